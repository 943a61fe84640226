"""Pairs of texts: every form of a row, rows that hold no pair, and batches."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import pad_batch
from radq.data.pairs import PairData, ResponseColumns, find_pairs, load_pairs
from radq.data.tokens import share_beginnings
from radq.errors import DataError
from radq.training.losses import prefix_weights

PAIR = ResponseColumns(["chosen", "rejected"])
PROMPTED = ResponseColumns(["chosen", "rejected"], prompt="prompt")
LIST = ResponseColumns(["answers"], scores="grades")
CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} . {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture
def load(tmp_path: Path, toy_tokenizer: PreTrainedTokenizerBase) -> Any:
    tokenizer = copy.deepcopy(toy_tokenizer)
    tokenizer.chat_template = CHAT

    def load_rows(
        rows: list[dict[str, Any]], columns: ResponseColumns, suffix: str = ".jsonl", **more: Any
    ) -> PairData:
        file = tmp_path / f"rows{suffix}"
        table = pandas.DataFrame(rows)
        if suffix == ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif suffix == ".parquet":
            table.to_parquet(file)
        else:
            table.to_csv(file, index=False)
        return load_pairs([file], tokenizer, columns, cache_folder=tmp_path / "cache", **more)

    load_rows.tokenizer = tokenizer  # type: ignore[attr-defined]
    return load_rows


def read(data: PairData, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """The context and the rest of each text, in the order of the pairs."""
    batch = data.batch(range(len(data)))
    found = []
    for ids, attended, counted in zip(*(batch[n] for n in ("input_ids", "attention_mask", "loss_mask")), strict=True):
        text, rest = ids[attended.bool() & ~counted.bool()], ids[counted.bool()]
        found.append((tokenizer.decode(text), tokenizer.decode(rest)))
    return found


# --- forms of rows ---


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("repeats", [False, True])
def test_texts_may_repeat_their_prompt(
    suffix: str, repeats: bool, load: Any, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = "the film was"
    texts = {"chosen": " good and fine .", "rejected": " really bad ."}
    rows = [{"prompt": prompt} | {name: prompt * repeats + text for name, text in texts.items()}]
    expected = [(prompt, "good and fine ."), (prompt, "really bad .")]
    assert read(load(rows, PROMPTED, suffix), toy_tokenizer) == expected
    if repeats:  # a beginning that both texts share is a prompt, also if no column names it
        assert read(load(rows, PAIR, suffix), toy_tokenizer) == expected


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("form", ["messages", "repeated", "implicit", "text prompt", "text answers"])
def test_chats(suffix: str, form: str, load: Any, toy_tokenizer: PreTrainedTokenizerBase) -> None:
    question = {"role": "the", "content": "film was"}
    answers = [[{"role": "assistant", "content": word}] for word in ("good", "bad")]
    if form in ("repeated", "implicit"):
        answers = [[question, *answer] for answer in answers]
    prompt: Any = [question]
    if form == "text prompt":
        prompt = "film was"
    if form == "text answers":
        answers = ["good", "bad"]
    row = {"chosen": answers[0], "rejected": answers[1]} | ({} if form == "implicit" else {"prompt": prompt})
    data = load([row], PAIR if form == "implicit" else PROMPTED, suffix)
    who = "<unk>" if form == "text prompt" else "the"  # the role user is no word of the toy
    assert read(data, toy_tokenizer) == [(f"{who} film was .<unk>", f"{word} .") for word in ("good", "bad")]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_lists_give_every_pair_with_different_scores(
    suffix: str, load: Any, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [
        {"answers": ["good .", "fine .", "bad .", "dull ."], "grades": [3, 2.5, 1, 1]},
        {"answers": ["poor .", "great ."], "grades": [-1, 7]},
    ]
    data = load(rows, LIST, suffix)
    texts = [rest.split()[0] for _, rest in read(data, toy_tokenizer)]
    found = set(zip(texts[0::2], texts[1::2], strict=True))
    assert found == {
        *(("good", word) for word in ("fine", "bad", "dull")),
        *(("fine", word) for word in ("bad", "dull")),
        ("great", "poor"),
    }
    assert data.groups.tolist() == [0] * 5 + [1]
    assert len(load(rows, LIST, suffix, max_pairs=2)) == 3
    train, held_out = data.split(0.5, seed=0)
    assert sorted([len(train), len(held_out)]) == [1, 5]  # a row is held out as a whole


def test_weights_belong_to_pairs(load: Any) -> None:
    rows = [{"chosen": "good", "rejected": "bad", "w": 2}, {"chosen": "fine", "rejected": "dull", "w": 0.5}]
    data = load(rows, ResponseColumns(["chosen", "rejected"], weight="w"))
    assert data.batch([1, 0])["weights"].tolist() == [0.5, 2.0]


def test_rows_of_several_files_stay_apart(tmp_path: Path, toy_tokenizer: PreTrainedTokenizerBase) -> None:
    for name, word in (("a", "good"), ("b", "great")):
        (tmp_path / f"{name}.csv").write_text(f"chosen,rejected\n{word},bad\n")
    data = load_pairs([tmp_path / "a.csv", tmp_path / "b.csv"], toy_tokenizer, PAIR, cache_folder=tmp_path / "cache")
    assert data.pairs.tolist() == [[0, 1], [2, 3]]
    assert data.groups.tolist() == [0, 1]


def test_a_long_prompt_loses_its_beginning_and_never_the_difference(
    load: Any, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    shared = "the film was good and the plot was fine and the cast was"
    data = load([{"chosen": f"{shared} great .", "rejected": f"{shared} dull ."}], PAIR, max_length=4)
    assert read(data, toy_tokenizer) == [("cast was", "great ."), ("cast was", "dull .")]


# --- rows without a pair ---


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"chosen": "good", "rejected": " "}, PAIR, "a response is empty"),
        ({"chosen": None, "rejected": "bad"}, PAIR, "a response is empty"),
        ({"chosen": [], "rejected": "bad"}, PAIR, "a response is empty"),
        ({"chosen": "good ", "rejected": "good"}, PAIR, "with different scores are equal, 'good'"),
        ({"answers": ["a", "b"], "grades": [1, 1]}, LIST, "no two responses with different scores"),
        ({"answers": [], "grades": []}, LIST, "no two responses with different scores"),
        ({"answers": ["a", "b", "a"], "grades": [1, 0, 0]}, LIST, "are equal, 'a'"),
    ],
)
def test_rows_without_a_pair_are_refused_or_counted(row: Any, columns: Any, message: str, load: Any) -> None:
    good = {"chosen": "good", "rejected": "bad"} if columns is PAIR else {"answers": ["good", "bad"], "grades": [1, 0]}
    with pytest.raises(DataError, match=f"rows.jsonl, row 2: .*{message}.* hint: .*--skip-empty"):
        load([good, row], columns)
    data = load([good, row], ResponseColumns(columns.texts, columns.scores, skip_empty=True))
    assert (len(data), data.counts.empty) == (1, 1)
    assert "1 rows with empty or equal texts left out" in data.describe()


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"answers": "good", "grades": [1]}, LIST, "'answers' must be a list of texts, got 'good'"),
        ({"answers": ["a", "b"], "grades": 1}, LIST, "'grades' must be a list of numbers, got 1"),
        ({"answers": ["a", "b"], "grades": [1, "high"]}, LIST, "must be a list of finite numbers"),
        ({"answers": ["a", "b"], "grades": [1]}, LIST, "'answers' has 2 responses and 'grades' has 1 score"),
        ({"chosen": ["good"], "rejected": "bad"}, PAIR, "'chosen' is a list, not a text"),
        ({"chosen": [{"role": "user"}], "rejected": "bad"}, PAIR, "content of a message must be a text, got None"),
        ({"chosen": "good"}, PAIR, "no column 'rejected'"),
    ],
)
def test_mistakes_are_named(row: Any, columns: Any, message: str, load: Any) -> None:
    with pytest.raises(DataError, match=message):
        load([row], columns)


# --- pairs and batches ---


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(1, 20))
def test_pairs_against_a_loop(scores: list[list[int]], max_pairs: int) -> None:
    groups = np.repeat(np.arange(len(scores)), [len(row) for row in scores])
    flat = np.concatenate([np.array(row, float) for row in scores])
    found = [tuple(pair) for pair in find_pairs(groups, flat, max_pairs, seed=0).tolist()]
    assert len(set(found)) == len(found)
    for group in range(len(scores)):
        members = np.flatnonzero(groups == group).tolist()
        expected = {(i, j) for i in members for j in members if flat[i] > flat[j]}
        here = {pair for pair in found if pair[0] in members}
        assert here <= expected
        assert len(here) == min(len(expected), max_pairs)
    assert found == sorted(found)


@given(st.lists(st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=3), min_size=1, max_size=3))
def test_shared_beginnings_move_to_the_prompts(rows: list[list[list[int]]]) -> None:
    texts = [text for row in rows for text in row]
    numbers = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    rest, prompts = share_beginnings(texts, [[9] for _ in texts], numbers)
    assert [prompt + text for prompt, text in zip(prompts, rest, strict=True)] == [[9, *text] for text in texts]
    for number in range(len(rows)):
        (length,) = {len(prompts[n]) - 1 for n in np.flatnonzero(numbers == number)}
        parts = [rest[n] for n in np.flatnonzero(numbers == number)]
        shortest = min(map(len, parts))
        assert shortest == 0 or shortest == 1 or len({part[0] for part in parts}) > 1  # one token stays
        assert length == 0 or shortest > 0


END = "<|endoftext|>"
SHORT, LONG = "the film was good .", "the film was bad and dull and poor ."


@pytest.mark.parametrize("form", ["texts", "list", "chats"])
@pytest.mark.parametrize(("max_length", "counted"), [(20, True), (4, False)])
def test_an_end_does_not_count_beside_an_answer_that_is_cut(
    form: str, max_length: int, counted: bool, load: Any, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = [SHORT, LONG] if form == "chats" else [SHORT + END, LONG + END]
    if form == "chats":
        template = "{% for m in messages %}{{ m.content }} <|endoftext|>{% endfor %}"
        load.tokenizer.chat_template = template
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    names = ResponseColumns(["chosen", "rejected"])
    row: dict[str, Any] = dict(zip(("chosen", "rejected"), texts, strict=True))
    if form == "list":
        names, row = LIST, {"answers": texts, "grades": [1, 0]}
    batch = load([row], names, max_length=max_length).batch([0])
    for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
        assert (toy_tokenizer.eos_token_id in ids[mask.bool()].tolist()) == counted
    assert toy_tokenizer.decode(batch["input_ids"][0][batch["loss_mask"][0].bool()]).startswith("good .")
    weights = prefix_weights(batch["loss_mask"])
    assert weights.sum(1).tolist() == pytest.approx([1, 1])


def test_rows_without_a_cut_answer_keep_their_ends(load: Any, toy_tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"chosen": SHORT + END, "rejected": text + END} for text in (LONG, "the film was bad .")]
    data = load(rows, PAIR, max_length=5)
    assert [rest.endswith(END) for _, rest in read(data, toy_tokenizer)] == [False, False, True, True]


def test_a_batch_has_two_texts_for_each_pair(load: Any) -> None:
    rows = [
        {"chosen": f"the film was {word}", "rejected": "this plot was very bad"} for word in ("good", "fine", "great")
    ]
    data = load(rows, PAIR)
    batch = data.batch([2, 0])
    sizes = {name: len(values) for name, values in batch.items()}
    assert sizes == {"rows": 2, "weights": 2} | dict.fromkeys(("texts", "input_ids", "attention_mask", "loss_mask"), 4)
    assert batch["texts"].tolist() == [4, 5, 0, 1]
    assert data.lengths.tolist() == [5, 5, 5]
    padded = pad_batch(batch, 3, 8)
    assert padded["rows"].tolist() == [2, 0, -1]
    assert padded["input_ids"].shape == (6, 8)
    assert not padded["attention_mask"][4:].any()
    empty = data.batch([])
    assert [len(empty["rows"]), len(empty["input_ids"])] == [1, 2]
    assert not any(values.any() for values in empty.values())
    assert torch.equal(data[1]["input_ids"], data.batch([1])["input_ids"])


def test_other_pairs_have_another_fingerprint(load: Any) -> None:
    rows = [{"answers": ["good", "fine", "bad", "dull"], "grades": [3, 2, 1, 0]}]
    fingerprints = {load(rows, LIST, max_pairs=n, seed=seed).fingerprint for n, seed in ((6, 0), (2, 0), (2, 1))}
    assert len(fingerprints) == 3
    assert load(rows, LIST, max_pairs=2).fingerprint == load(rows, LIST, max_pairs=2).fingerprint
