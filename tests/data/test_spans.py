"""Labels of spans: each token has the label of the characters that it stands for, whatever the tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from radq.data.dataset import SpanData, load_data, pad_batch
from radq.data.examples import NO_SPAN, DataColumns, mark_tokens
from radq.data.label_scale import LabelRules
from radq.errors import DataError

SPANS = DataColumns(spans="marks")
BOTH = DataColumns(labels=["y"], spans="marks")


def load(
    folder: Path,
    rows: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    columns: DataColumns = SPANS,
    suffix: str = ".jsonl",
    **more: Any,
) -> SpanData:
    file = folder / f"rows{suffix}"
    if suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_data([file], tokenizer, columns, cache_folder=folder / "cache", **more)
    assert isinstance(data, SpanData)
    return data


def make_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, in which most characters beyond ASCII are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model)


@given(st.text("aé 🙂b", max_size=12), st.lists(st.integers(0, 12), min_size=2, max_size=6, unique=True))
def test_tokens_of_bytes_have_the_span_of_their_character(text: str, places: list[int]) -> None:
    ends = sorted(place for place in places if place <= len(text))
    spans = np.array(list(zip(ends[::2], ends[1::2], strict=False)), np.int64).reshape(-1, 2)
    expected = []
    for place, letter in enumerate(text):
        inside = [number for number, (start, end) in enumerate(spans) if start <= place < end]
        expected += [inside[0] + 5 if inside else NO_SPAN] * len(letter.encode())
    (found,) = mark_tokens(make_bytes(), [text], [spans], first=5)
    assert found.tolist() == expected


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_spans_alone_have_a_loss(suffix: str, toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [
        {"text": "the film was good and bad", "marks": [[13, 17, 1.0], [22, 25, 0.0]]},
        {"text": "the plot was fine", "marks": []},
        {"text": "a dull plot", "marks": [[2, 6, 0.5]]},
    ]
    data = load(tmp_path, rows, toy_tokenizer, suffix=suffix)
    batch = data.batch([0, 1, 2])
    assert batch["loss_mask"].tolist() == [[0, 0, 0, 1, 0, 1], [0] * 6, [0, 1, 0, 0, 0, 0]]
    assert batch["token_labels"][..., 0].tolist() == [[0, 0, 0, 1, 0, 0], [0] * 6, [0, 0.5, 0, 0, 0, 0]]
    assert sorted(data.token_labels.tolist()) == [0, 0.5, 1]
    assert data.mean_labels == pytest.approx([0.5])
    assert data.label_limits == [(0, 1)]
    padded = pad_batch(batch, 4, 8)
    assert padded["token_labels"].shape == (4, 8, 1)
    assert torch.equal(padded["token_labels"][:3, :6], batch["token_labels"])


def test_other_tokens_have_the_label_of_their_text(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"text": "the film was good", "marks": [[13, 17, 5]], "y": 1}, {"text": "a plot", "marks": None, "y": 3}]
    data = load(tmp_path, rows, toy_tokenizer, BOTH)
    batch = data.batch([0, 1])
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["token_labels"][..., 0].tolist() == [[0, 0, 0, 1], [0.5, 0.5, 0, 0]]  # one scale, 1 to 5
    train, held_out = data.split(0.5, 0)
    assert len(train.token_labels) + len(held_out.token_labels) == 6  # pyright: ignore[reportAttributeAccessIssue]
    assert len({data.fingerprint, train.fingerprint, held_out.fingerprint}) == 3


def test_prompts_shift_spans_and_long_texts_lose_them(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"p": "this movie", "text": "the film was good", "marks": [[0, 3, 0], [13, 17, 1]]}]
    columns = DataColumns(prompt="p", spans="marks")
    batch = load(tmp_path, rows, toy_tokenizer, columns).batch([0])
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 0, 0, 1]]
    assert batch["token_labels"][0, :, 0].tolist() == [0, 0, 0, 0, 0, 1]
    batch = load(tmp_path, rows, toy_tokenizer, columns, max_length=3).batch([0])
    assert batch["loss_mask"].tolist() == [[1, 0, 0]]


def test_labels_of_spans_may_be_words(toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"text": "good film bad plot", "marks": [[0, 4, "praise"], [10, 13, "blame"]]}]
    rules = LabelRules.parse("blame=0.25,praise=1")
    for suffix in (".jsonl", ".parquet"):
        if suffix == ".parquet":  # which has one type in a list
            rows = [{"text": row["text"], "marks": [list(map(str, span)) for span in row["marks"]]} for row in rows]
        data = load(tmp_path, rows, toy_tokenizer, DataColumns(spans="marks", label_rules=rules), suffix)
        assert data.batch([0])["token_labels"][0, :, 0].tolist() == [1, 0, 0.25, 0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "film", "marks": "0-4"}, "row 1: 'marks' must be a list of spans, got '0-4'"),
        ({"text": "film", "marks": [[0, 5, 1]]}, "row 1: 'marks' has the span \\[0, 5, 1\\] in a text of 4"),
        ({"text": "film", "marks": [[2, 2, 1]]}, "row 1: 'marks' has the span"),
        ({"text": "film", "marks": [[-1, 2, 1]]}, "row 1: 'marks' has the span"),
        ({"text": "film", "marks": [[0, 1]]}, "row 1: 'marks' has the span"),
        ({"text": "film", "marks": [[0, 1.5, 1]]}, "row 1: 'marks' has the span"),
        ({"text": "film", "marks": [[False, 3, 1]]}, "row 1: 'marks' has the span \\[False, 3, 1\\]"),
        ({"text": "film", "marks": [[0, 3, 1], [2, 4, 1]]}, "row 1: 'marks' has spans that overlap"),
        ({"text": "film", "marks": [[0, 3, None]]}, "row 1: 'marks' has no label"),
        ({"text": "film", "marks": []}, "'marks' holds no spans"),
        ({"text": "film  ", "marks": [[4, 6, 1]]}, "no token has a label of 'marks'"),
        ({"text": [{"role": "user", "content": "film"}], "marks": [[0, 4, 1]]}, "row 1: .*'text'|spans of a chat"),
    ],
)
def test_wrong_spans_are_named(
    row: dict[str, Any], message: str, toy_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        load(tmp_path, [row], toy_tokenizer)


def test_a_tokenizer_without_places_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not say where its tokens stand"):
        load(tmp_path, [{"text": "film", "marks": [[0, 4, 1]]}], ByT5Tokenizer())
