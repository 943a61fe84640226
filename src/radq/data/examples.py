"""Rows of tables, read and checked: texts with prompts, labels, spans and weights.

    for piece in read_examples("reviews.csv.gz", DataColumns(text="text", labels=["praise"])): ...

A cell with spans is a list of [start, end, label], where start and end count the characters of the text of the row as
in Python's text[start:end].

Axes: n rows, t time, s spans.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from radq.data.chats import is_chat, render_answer
from radq.data.label_cells import LabelCells, join_cells, read_cells
from radq.data.label_scale import LabelRules
from radq.data.tables import Table, cell_text, check_columns, column_numbers, read_table, refuse_rows
from radq.errors import DataError


@dataclass(frozen=True)
class DataColumns:
    """Names of the columns of a table, and how to read them.

    Args:
        text: column with the texts, or with chats: lists of messages of which the last one is the text.
        labels: columns with the labels, one per attribute; none for distillation, which needs texts alone.
        prompt: column with a context that stands before each text, or with the first messages of a chat; the loss does
            not count its tokens.
        weight: column with the weight of each row, at least 0.
        label_rules: how labels become numbers, where radq is not to decide.
        skip_empty: skip and count rows with an empty text; by default such a row is an error.
        spans: column with spans of the texts that have labels of their own, see `radq.data.spans`.
        missing_labels: whether rows may lack labels, and files whole columns of them.
    """

    text: str = "text"
    labels: Sequence[str] = ()
    prompt: str | None = None
    weight: str | None = None
    label_rules: LabelRules = field(default_factory=LabelRules)
    skip_empty: bool = False
    spans: str | None = None
    missing_labels: bool = False

    @property
    def names(self) -> list[str]:
        """Names of all columns that are read."""
        return [name for name in (self.text, self.prompt, self.weight, self.spans, *self.labels) if name is not None]

    @property
    def optional(self) -> Sequence[str]:
        """Names of those that a table may lack."""
        return self.labels if self.missing_labels else ()


@dataclass
class SpanCells:
    """The spans of consecutive rows: for each row an array (s, 2) of starts and ends, and the labels of all spans."""

    limits: list[np.ndarray]
    labels: LabelCells


@dataclass
class Piece:
    """Consecutive rows of a source, read and checked."""

    texts: list[str]
    prompts: list[str]
    labels: LabelCells
    weights: np.ndarray  # (n,)
    empty: int  # rows that were left out
    spans: SpanCells | None = None
    compares: bool = False  # texts of one row are compared, so the tokens with which all of them begin are a prompt


def read_examples(
    source: str | Path, columns: DataColumns, tokenizer: PreTrainedTokenizerBase | None = None
) -> Iterator[Piece]:
    """Read and check the rows of a file or hub data set; an error names source, row and value.

    The tokenizer writes chats as texts; without one, they are refused.
    """
    first_row = 1
    for table in read_table(source):
        check_columns(source, table, columns.names, columns.optional)
        if absent := [name for name in columns.optional if name not in table.columns]:
            table = table.assign(**dict.fromkeys(absent, np.nan))
        table.index = np.arange(first_row, first_row + len(table))  # row numbers, for errors
        first_row += len(table)
        examples = [*_read_texts(source, table, columns, tokenizer)]
        full = np.array([text != "" for _, text in examples], dtype=bool)
        if not full.all() and not columns.skip_empty:
            first = int(np.argmin(full))
            problem = "does not end with an answer" if is_chat(table[columns.text].iloc[first]) else "is empty"
            place = f"{source}, row {table.index[first]}"
            raise DataError(f"{place}: {columns.text!r} {problem}.", "skip such rows with --skip-empty.")
        table = table[full]
        yield Piece(
            texts=[text for _, text in examples if text],
            prompts=[prompt for prompt, text in examples if text],
            labels=read_cells(source, table, columns.labels, columns.missing_labels),
            spans=None if columns.spans is None else read_spans(source, table, columns.spans, columns.text),
            weights=column_weights(source, table, columns.weight),
            empty=int((~full).sum()),
        )


def _read_texts(
    source: str | Path, table: Table, columns: DataColumns, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[tuple[str, str]]:
    """Read the prompt and the text of each row; of a chat, the messages before the last one are the prompt."""
    prompts = [None] * len(table) if columns.prompt is None else table[columns.prompt]
    for row, prompt, text in zip(table.index, prompts, table[columns.text], strict=True):
        try:
            if tokenizer is not None and (is_chat(text) or is_chat(prompt)):
                yield render_answer(tokenizer, prompt, text)
            else:
                yield cell_text(prompt, columns.prompt or ""), cell_text(text, columns.text)
        except DataError as error:
            raise DataError(f"{source}, row {row}: {error.message}", error.hint) from error


def column_weights(source: str | Path, table: Table, name: str | None) -> np.ndarray:
    """The weights of the rows of a table in single precision, (n,); 1 if there is no column with weights."""
    if name is None:
        return np.ones(len(table), np.float32)
    numbers = column_numbers(source, table, name)
    refuse_rows(source, table, name, numbers < 0, "at least 0")
    return _single(source, table, name, numbers)


def _single(source: str | Path, table: Table, name: str, numbers: np.ndarray) -> np.ndarray:
    """Convert numbers to single precision, in which training computes, and refuse numbers that are too large."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = numbers.astype(np.float32)
    refuse_rows(source, table, name, ~np.isfinite(single), "between -3.4e38 and 3.4e38")
    return single


NO_SPAN = -1
SPAN_NUMBERS = "span_numbers.bin"  # for each token the number of its span
SPAN_FOLDER = "spans"  # with the labels of all spans


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
