"""Rows of tables, read and checked: texts with prompts, labels, spans and weights.

    for piece in read_examples("reviews.csv.gz", DataColumns(text="text", labels=["praise"])): ...

Axes: n rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from radq.data.chats import is_chat, render_answer
from radq.data.label_cells import LabelCells, read_cells
from radq.data.label_scale import LabelRules
from radq.data.span_cells import SpanCells, read_spans
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
