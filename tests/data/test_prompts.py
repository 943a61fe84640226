"""Prompts from every layout, chosen and filtered, and files with other fields refused by name."""

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest

from radq.data.prompts import Prompt, read_prompts
from radq.errors import DataError, OptionError

RTP = [
    {"filename": "x", "prompt": {"text": f"prompt {n} ", "toxicity": score}, "continuation": {"text": " and"}}
    for n, score in enumerate([0.1, 0.5, None, 0.49, 0.9])
]


def write_jsonl(file: Path, rows: list) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def texts(*arguments: object, **options: object) -> list[str]:
    return [prompt.text for prompt in read_prompts(*arguments, **options)]


def test_every_layout_gives_the_same_prompts(tmp_path: Path) -> None:
    wanted = ["the film", "this  plot", "2024", "ÿ“"]
    layouts = {
        "toxicity": [{"prompt": {"text": text, "toxicity": 0.1}, "continuation": {"text": "?"}} for text in wanted],
        "sentiment": [{"md5_hash": "0", "prompt": {"text": text}, "num_positive": 3} for text in wanted],
        "plain": [{"prompt": text + " "} for text in wanted],
        "text": [{"text": text, "other": 1} for text in wanted],
    }
    for name, rows in layouts.items():
        file = write_jsonl(tmp_path / f"{name}.jsonl", rows)
        assert read_prompts(file) == [Prompt(text, name) for text in wanted]
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
        (tmp_path / f"{name}.jsonl.xz").write_bytes(lzma.compress(file.read_bytes()))
        assert read_prompts(tmp_path / f"{name}.jsonl.gz") == read_prompts(tmp_path / f"{name}.jsonl.xz")
        assert read_prompts(tmp_path / f"{name}.jsonl.gz", group="neutral") == [Prompt(t, "neutral") for t in wanted]
    pandas.DataFrame({"text": wanted}).to_csv(tmp_path / "table.csv", index=False)
    assert texts(tmp_path / "table.csv") == wanted
    for name in ("lines.txt", "lines"):
        (tmp_path / name).write_text("\n".join(wanted) + "  \n\n  \n", encoding="utf-8")
        assert texts(tmp_path / name) == wanted


def test_an_empty_prompt_in_a_table_is_kept(tmp_path: Path) -> None:
    assert texts(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": ""}, {"prompt": "a"}])) == ["", "a"]


def test_toxic_prompts_and_those_never_scored_are_left_out(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rtp.jsonl", RTP)
    assert len(texts(file)) == 5
    assert texts(file, max_toxicity=0.5) == ["prompt 0", "prompt 3"]
    assert texts(file, max_toxicity=0.5, limit=1) == ["prompt 0"]
    with pytest.raises(DataError, match=r"no prompt has a toxicity below 0\.05.*max_toxicity"):
        read_prompts(file, max_toxicity=0.05)
    pandas.DataFrame({"prompt": ["a", "b"], "toxicity": ["0.2", "0.7"]}).to_csv(tmp_path / "t.csv", index=False)
    assert texts(tmp_path / "t.csv", max_toxicity=0.5) == ["a"]


def test_some_of_the_prompts(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": str(n)} for n in range(100)])
    assert texts(file, limit=3) == ["0", "1", "2"]
    chosen = texts(file, limit=10, seed=1)
    assert chosen == texts(file, limit=10, seed=1) != texts(file, limit=10, seed=2)
    assert len(set(chosen)) == 10
    assert chosen == sorted(chosen, key=int) != [str(n) for n in range(10)]
    assert len(texts(file, limit=1000, seed=1)) == len(texts(file, limit=1000)) == 100
    with pytest.raises(OptionError, match="limit must be at least 1, got 0"):
        read_prompts(file, limit=0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a", "answer": "b"}], 'fields question, answer.*"prompt"'),
        ([{"prompt": "a"}, {"prompt": {"body": "b", "id": 1}}], 'row 2: the prompt has the fields body, id.*"text"'),
        ([{"prompt": "a"}, {"prompt": ["b"]}], "row 2: the prompt is \\['b'\\]"),
        ([{"prompt": "a"}, {"text": "b"}], "row 2: the prompt is nan"),
        ([{"prompt": {"text": "a", "toxicity": "much"}}], "row 1: toxicity must be a number or empty, got 'much'"),
        ([], "rows.jsonl.*no prompts"),
    ],
)
def test_other_fields_are_named(rows: list, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_prompts(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert caught.value.hint


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no toxicity"):
        read_prompts(write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}]), max_toxicity=0.5)
    with pytest.raises(DataError, match="absent.txt"):
        read_prompts(tmp_path / "absent.txt")
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(DataError, match="is not a text file"):
        read_prompts(tmp_path / "image")


def test_excerpts_of_the_papers_prompt_files(excerpts: Path) -> None:
    prompts = read_prompts(excerpts / "rtp.jsonl")
    assert len(prompts) == 50
    assert prompts[0] == Prompt("My neighbour thinks a bowl of soup", "rtp")
    assert len(read_prompts(excerpts / "rtp.jsonl", max_toxicity=0.5)) == 35  # 3 were never scored
    neutral = read_prompts(excerpts / "sentiment_neutral.jsonl")
    assert len(neutral) == 50
    assert neutral[0] == Prompt("The train to the coast", "sentiment_neutral")


def test_the_papers_prompt_files(shared_file: Callable[[str], Path]) -> None:
    rtp = shared_file("data/prompts/rtp_4k.jsonl.gz")
    assert len(read_prompts(rtp)) == 4000
    assert len(read_prompts(rtp, max_toxicity=0.5)) == 2980  # 14 were never scored
    neutral = read_prompts(shared_file("data/prompts/sentiment_neutral.jsonl.gz"))
    assert len(neutral) == 5000
    assert neutral[0] == Prompt("God never intended to", "sentiment_neutral")
