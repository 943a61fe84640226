"""Pairs of texts that a language model compares, in both orders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from chat_servers import MARK, Answer, faking, say
from command_calls import make_steering_model

from radq.cli import main
from radq.errors import DataError, OptionError
from radq.evaluation.sweep.config import JudgeUse, PromptFile, Sweep
from radq.files import read_lines
from radq.judges.llm import PairRubric, load_pair_judge, score_pairs
from radq.toy import GOOD


@pytest.fixture
def rubric(tmp_path: Path) -> Path:
    (tmp_path / "rubric.md").write_text("The better text has more good words.")
    return tmp_path / "rubric.md"


def read_pair(body: dict[str, Any]) -> tuple[str, str]:
    parts = body["messages"][0]["content"].split(MARK)
    return parts[1].rstrip("\n"), parts[3].rstrip("\n")


def compare_good_words(number: int, body: dict[str, Any]) -> Answer:
    first, second = (sum(word in GOOD for word in text.split()) for text in read_pair(body))
    return say("A" if first > second else "B" if second > first else "tie")


def test_the_better_text_wins_in_both_orders(rubric: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with faking(compare_good_words) as (fake, address):
        monkeypatch.setenv("OPENAI_BASE_URL", address)
        judge = load_pair_judge(f"openai:m#{rubric}")
        good, bad = f"it is {sorted(GOOD)[0]}", "it is it"
        wins = score_pairs(judge, [good, bad, good, " "], [bad, good, good, bad])
    np.testing.assert_array_equal(wins, [1, 0, 0.5, np.nan])
    asked = [read_pair(body) for body in fake.calls]
    assert sorted(asked) == sorted([(good, bad), (bad, good), (bad, good), (good, bad), (good, good), (good, good)])


def test_a_judge_of_positions_finds_ties_alone(rubric: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with faking(lambda number, body: say("A")) as (_, address):
        monkeypatch.setenv("OPENAI_BASE_URL", address)
        wins = score_pairs(load_pair_judge(f"openai:m#{rubric}"), ["a", "b"], ["c", "d"])
    np.testing.assert_array_equal(wins, [0.5, 0.5])


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("A", 1.0),
        ("**b**", 0.0),
        ("Text A.", 1.0),
        ("<think>B?</think>\ntie", 0.5),
        ("Answer: B", 0.0),
        ("A is better than B", None),
        ("both", None),
        ("", None),
    ],
)
def test_answers(answer: str, score: float | None) -> None:
    assert PairRubric("x").find_score(answer) == score


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    (tmp_path / "empty.md").write_text("")
    for wrong in ("openai:m", "linear:x#rubric.md"):
        with pytest.raises(OptionError, match="language models alone"):
            load_pair_judge(wrong)
    for wrong in ("empty.md", "nowhere.md"):
        with pytest.raises(DataError, match="the rubric"):
            load_pair_judge(f"openai:m#{tmp_path / wrong}")
    for metrics, reads in ((["win_rate"], "text"), (["mean_score"], "pair")):
        with pytest.raises(OptionError, match="reads: pair"):
            Sweep("lm", [PromptFile("x")], judges={"better": JudgeUse("openai:m#r", metrics, reads)})  # pyright: ignore


def test_a_sweep_has_win_rates(rubric: Path, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make_steering_model(toy, ["praise"]).save_pretrained(tmp_path / "q")
    (tmp_path / "prompts.txt").write_text("the film\nthe plot was\na story\n")
    sweep = {
        "base": str(toy),
        "prompts": [{"file": str(tmp_path / "prompts.txt"), "group": "all"}],
        "guides": {"q": {"folder": str(tmp_path / "q"), "weights": {"praise": 1}, "beta": [30]}},
        "judges": {"better": {"judge": f"openai:m#{rubric}", "metrics": ["win_rate"], "reads": "pair"}},
        "samples": 4,
        "max_new_tokens": 6,
        "resamples": 20,
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    words = ["eval", "--config", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out"), "--json"]
    with faking(compare_good_words) as (fake, address):
        monkeypatch.setenv("OPENAI_BASE_URL", address)
        assert main([*words, "--cache", str(tmp_path / "cache")]) == 0
    rows = {row["cell"]: row for row in read_lines(tmp_path / "out" / "metrics.jsonl")}
    unguided, guided = (rows[name]["metrics"]["win_rate[better]"]["value"] for name in rows)
    assert unguided == 0.5
    texts, blank = {}, {}
    for line in (tmp_path / "out" / "generations.jsonl").read_text().splitlines():
        row = json.loads(line)
        blank.setdefault(row["cell"], []).append([not text.strip() for text in row["continuations"]])
        texts.setdefault(row["cell"], []).append([row["text"] + text for text in row["continuations"]])
    first, second = texts.values()
    counts = [
        np.array([[sum(word in GOOD for word in t.split()) for t in row] for row in one]) for one in (first, second)
    ]
    compared = ~np.any(list(blank.values()), axis=0)
    wins = 0.5 + 0.5 * np.sign(counts[1] - counts[0])
    expected = np.mean([row[full].mean() for row, full in zip(wins, compared, strict=True) if full.any()])
    assert guided == pytest.approx(expected)
    assert fake.calls
