"""Cells with spans of a text, and the tokens that they mark.

A cell is a list of [start, end, label], where start and end count the characters of the text of the row as in Python's
text[start:end]. Axes: t time, s spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from radq.data.chats import is_chat
from radq.data.label_cells import LabelCells, join_cells, read_cells
from radq.data.tables import Table
from radq.errors import DataError

NO_SPAN = -1
SPAN_NUMBERS = "span_numbers.bin"  # for each token the number of its span
SPAN_FOLDER = "spans"  # with the labels of all spans


@dataclass
class SpanCells:
    """The spans of consecutive rows: for each row an array (s, 2) of starts and ends, and the labels of all spans."""

    limits: list[np.ndarray]
    labels: LabelCells


def read_spans(source: str | Path, table: Table, column: str, text: str) -> SpanCells:
    """Read the spans of a table whose index numbers its rows; an error names source, row and value."""
    import pandas

    limits, labels, places = [], [], []
    for row, cell, whole in zip(table.index, table[column], table[text], strict=True):
        try:
            spans = _read_cell(cell, column, whole)
        except DataError as error:
            raise DataError(f"{source}, row {row}: {error.message}", error.hint) from error
        limits.append(np.array([span[:2] for span in spans], np.int64).reshape(-1, 2))
        labels += [span[2] for span in spans]
        places += [row] * len(spans)
    cells = pandas.DataFrame({column: pandas.Series(labels, index=places, dtype=object)})
    return SpanCells(limits, read_cells(source, cells, [column]))


def _read_cell(cell: Any, column: str, text: Any) -> list[tuple[int, int, Any]]:
    if cell is None or (isinstance(cell, float) and cell != cell):
        return []
    if is_chat(text):
        raise DataError(f"{column!r} has spans of a chat.", "give the text itself, and the chat before it as --prompt.")
    hint = "write it as [[start, end, label], …], with 0 <= start < end <= the length of the text, in jsonl or parquet."
    if not isinstance(cell, list | tuple | np.ndarray):
        raise DataError(f"{column!r} must be a list of spans, got {cell!r}.", hint)
    spans = [_read_span(span, len(str(text))) for span in cell]
    for span, original in zip(spans, cell, strict=True):
        if span is None:
            raise DataError(f"{column!r} has the span {original!r} in a text of {len(str(text))} characters.", hint)
    found = sorted((span for span in spans if span is not None), key=lambda span: span[:2])
    for before, after in pairwise(found):
        if after[0] < before[1]:
            raise DataError(f"{column!r} has spans that overlap, {before} and {after}.", "cut one of them off.")
    return found


def _read_span(span: Any, length: int) -> tuple[int, int, Any] | None:
    """Start, end and label of a span; None if it is none. Parquet writes a list with a word in it as texts."""
    if not isinstance(span, list | tuple | np.ndarray) or len(span) != 3:
        return None
    start, end = (_read_place(place) for place in span[:2])
    if start is None or end is None or not 0 <= start < end <= length:
        return None
    return start, end, span[2]


def _read_place(place: Any) -> int | None:
    if isinstance(place, str) and place.isdecimal():
        return int(place)
    is_whole = isinstance(place, Integral) and not isinstance(place, bool)
    return int(place) if is_whole or (isinstance(place, float | np.floating) and float(place).is_integer()) else None


def mark_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limits: Sequence[np.ndarray], first: int
) -> list[np.ndarray]:
    """The number of the span of each token, (t,) for each text, where spans are counted from `first`.

    A token that shares characters with two spans belongs to the second one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError("the tokenizer does not say where its tokens stand.", "choose a model with a fast tokenizer.")
    found = []
    for encoding, spans in zip(backend.encode_batch(list(texts), add_special_tokens=False), limits, strict=True):
        numbers = np.full(len(encoding.ids), NO_SPAN, np.int32)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for start, end in spans:
            numbers[(places[:, 0] < end) & (places[:, 1] > start)] = first
            first += 1
        found.append(numbers)
    return found


class SpanWriter:
    """Writes the spans of all rows beside their tokens."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase):
        self.folder, self.tokenizer = folder, tokenizer
        self.labels: list[LabelCells] = []
        self.count = 0

    def write(self, cells: SpanCells, texts: Sequence[str], lengths: Sequence[tuple[int, int]]) -> None:
        """Append the spans of texts, of which prompt and text have so many tokens after they were cut off."""
        marks = mark_tokens(self.tokenizer, texts, cells.limits, self.count)
        with (self.folder / SPAN_NUMBERS).open("ab") as stream:
            for numbers, (prompt, text) in zip(marks, lengths, strict=True):
                np.concatenate([np.full(prompt, NO_SPAN, np.int32), numbers[:text]]).tofile(stream)
        self.labels.append(cells.labels)
        self.count += len(cells.labels.rows)

    def close(self) -> None:
        if self.labels:
            (self.folder / SPAN_FOLDER).mkdir()
            join_cells(self.labels).save(self.folder / SPAN_FOLDER)
