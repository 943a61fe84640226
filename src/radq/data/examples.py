"""Rows of tables, read and checked: texts or chats with prompts, labels, spans and weights.

    for piece in DataColumns(text="text", labels=["praise"]).read("reviews.csv.gz"): ...

A chat is a list of messages, dictionaries with the texts `role` and `content`, which the chat template of a tokenizer
writes as texts: a context and the answer to it. The context is what a base model has read when it begins to answer.

A cell with spans is a list of [start, end, label], where start and end count the characters of the text of the row as
in Python's text[start:end].

Axes: n rows, t time, s spans.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from radq.data.label_scale import LabelCells, LabelRules, read_cells
from radq.data.tables import Table, cell_text, check_columns, in_row, read_table, refuse_rows
from radq.errors import DataError, first_line
from radq.settings import read_number

Message = dict[str, str]
Chat = list[Message]


@dataclass
class Piece:
    """Consecutive rows of a source, read and checked."""

    texts: list[str]
    prompts: list[str]
    labels: LabelCells
    weights: np.ndarray  # (n,)
    empty: int  # rows that were left out
    spans: tuple[list[np.ndarray], LabelCells] | None = None  # starts and ends, (s, 2) for each row; labels of all
    compares: bool = False  # texts of one row are compared, so the tokens with which all of them begin are a prompt


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
        spans: column with spans of the texts that have labels of their own.
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

    def read(self, source: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Iterator[Piece]:
        """Read and check the rows of a file or hub data set; an error names source, row and value.

        The tokenizer writes chats as texts; without one, they are refused.
        """
        names = [name for name in (self.text, self.prompt, self.weight, self.spans, *self.labels) if name is not None]
        optional = self.labels if self.missing_labels else ()
        for table in read_table(source):
            check_columns(source, table.columns, names, optional)
            table = table.assign(**{name: np.nan for name in optional if name not in table.columns})
            examples = [*self._read_texts(source, table, tokenizer)]
            full = np.array([text != "" for _, text in examples], dtype=bool)
            if not full.all() and not self.skip_empty:
                row = table.index[int(np.argmin(full))]
                problem = "does not end with an answer" if is_chat(table[self.text][row]) else "is empty"
                raise DataError(f"{source}, row {row}: {self.text!r} {problem}.", "skip such rows with --skip-empty.")
            table = table[full]
            yield Piece(
                texts=[text for _, text in examples if text],
                prompts=[prompt for prompt, text in examples if text],
                labels=read_cells(source, table, self.labels, self.missing_labels),
                spans=None if self.spans is None else _read_spans(source, table, self.spans, self.text),
                weights=column_weights(source, table, self.weight),
                empty=int((~full).sum()),
            )

    def _read_texts(
        self, source: str | Path, table: Table, tokenizer: PreTrainedTokenizerBase | None
    ) -> Iterator[tuple[str, str]]:
        """Read the prompt and the text of each row; of a chat, the messages before the last one are the prompt."""
        prompts = [None] * len(table) if self.prompt is None else table[self.prompt]
        for row, prompt, text in zip(table.index, prompts, table[self.text], strict=True):
            with in_row(source, row):
                if tokenizer is not None and (is_chat(text) or is_chat(prompt)):
                    example = render_answer(tokenizer, prompt, text)
                else:
                    example = cell_text(prompt, self.prompt or ""), cell_text(text, self.text)
            yield example


def column_weights(source: str | Path, table: Table, name: str | None) -> np.ndarray:
    """The weights of the rows of a table in single precision, (n,); 1 if there is no column with weights."""
    if name is None:
        return np.ones(len(table), np.float32)
    weights = np.array([read_number(value) for value in table[name]], np.float64)
    wrong = ~((weights >= 0) & (weights <= np.finfo(np.float32).max))
    refuse_rows(source, table, name, wrong, "must be a number from 0 to 3.4e38")
    return weights.astype(np.float32)


# --- chats ---


def is_chat(value: Any) -> bool:
    """Whether the value of a cell is a list of messages, or should be one."""
    return isinstance(value, list | tuple | np.ndarray) and all(isinstance(item, dict) for item in value)


def read_chat(value: Any, role: str) -> Chat:
    """Read the messages of a cell; a text alone is one message of this role, and a missing or blank one is none."""
    if isinstance(value, str):
        return [{"role": role, "content": value.rstrip()}] if value.strip() else []
    if not is_chat(value):
        return []
    for message in value:
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                problem = f"the {name} of a message must be a text, got {message.get(name)!r}."
                raise DataError(problem, "change or remove this row.")
    return [{name: message[name] for name in ("role", "content")} for message in value]


def render_chats(tokenizer: PreTrainedTokenizerBase, prompt: Chat, answers: Sequence[Chat]) -> tuple[str, list[str]]:
    """Write a context and the answers to it as texts: the context and the first of them are the whole first chat.

    Answers may repeat the messages of the prompt, and messages with which all of them begin are part of the context.
    """
    answers = [answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer for answer in answers]
    shared = max(0, min(count_shared(answers), min(map(len, answers)) - 1))  # each answer keeps a message
    prompt, answers = prompt + answers[0][:shared], [answer[shared:] for answer in answers]
    whole = [_render(tokenizer, prompt + answer, False) for answer in answers]
    begins = all(answer and answer[0]["role"] == "assistant" for answer in answers)
    context = _render(tokenizer, prompt, begins) if prompt else ""
    context = context[: count_shared([context, *whole])]  # some templates write earlier answers otherwise
    return context, [text[len(context) :] for text in whole]


def render_answer(tokenizer: PreTrainedTokenizerBase, prompt: Any, cell: Any) -> tuple[str, str]:
    """Write the last message of a chat, and as its context the prompt and all messages before it.

    Both are empty if the chat does not end with an answer of the assistant.
    """
    chat = read_chat(cell, "assistant")
    if not chat or chat[-1]["role"] != "assistant" or not chat[-1]["content"].strip():
        return "", ""
    context, (answer,) = render_chats(tokenizer, read_chat(prompt, "user"), [chat])
    return context, answer.rstrip()


def count_shared(sequences: Sequence[Sequence[Any]]) -> int:
    """The number of items with which all of these begin."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda column: all(item == column[0] for item in column), columns))


def _render(tokenizer: PreTrainedTokenizerBase, chat: Chat, add_generation_prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template for messages.", "write each cell as one text.")
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # templates raise errors of their own, about roles for example
        raise DataError(
            f"the chat template refuses these messages: {first_line(error)}.", "change or remove this row."
        ) from error
    assert isinstance(text, str)
    return text


# --- spans ---

NO_SPAN = -1
SPAN_NUMBERS = "span_numbers.bin"  # for each token the number of its span
SPAN_FOLDER = "spans"  # with the labels of all spans


def _read_spans(source: str | Path, table: Table, column: str, text: str) -> tuple[list[np.ndarray], LabelCells]:
    """Read the spans of a table; an error names source, row and value."""
    import pandas

    limits, labels, rows = [], [], []
    for row, cell, whole in zip(table.index, table[column], table[text], strict=True):
        with in_row(source, row):
            spans = _read_cell(cell, column, whole)
        limits.append(np.array([span[:2] for span in spans], np.int64).reshape(-1, 2))
        labels += [span[2] for span in spans]
        rows += [row] * len(spans)
    cells = pandas.DataFrame({column: pandas.Series(labels, index=rows, dtype=object)})
    return limits, read_cells(source, cells, [column])


def _read_cell(cell: Any, column: str, text: Any) -> list[tuple[int, int, Any]]:
    """Start, end and label of each span of a text, in their order."""
    if cell is None or (isinstance(cell, float) and cell != cell):
        return []
    if is_chat(text):
        raise DataError(f"{column!r} has spans of a chat.", "give the text itself, and the chat before it as --prompt.")
    hint = "write it as [[start, end, label], …], with 0 <= start < end <= the length of the text, in jsonl or parquet."
    if not isinstance(cell, list | tuple | np.ndarray):
        raise DataError(f"{column!r} must be a list of spans, got {cell!r}.", hint)
    spans = []
    for span in cell:
        is_span = isinstance(span, list | tuple | np.ndarray) and len(span) == 3
        is_span = is_span and not any(isinstance(offset, bool | np.bool_) for offset in span[:2])
        start, end = map(read_number, span[:2] if is_span else (None, None))  # parquet may write them as texts
        if not (start.is_integer() and end.is_integer() and 0 <= start < end <= len(str(text))):
            raise DataError(f"{column!r} has the span {span!r} in a text of {len(str(text))} characters.", hint)
        spans.append((int(start), int(end), span[2]))
    spans.sort(key=lambda span: span[:2])
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            raise DataError(f"{column!r} has spans that overlap, {before} and {after}.", "cut one of them off.")
    return spans


def mark_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limits: Sequence[np.ndarray], first: int
) -> list[np.ndarray]:
    """The number of the span of each token, (t,) for each text, where spans are counted from `first`.

    A token that shares characters with two spans belongs to the second one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError("the tokenizer does not say where its tokens stand.", "choose a model with a fast tokenizer.")
    marks = []
    for encoding, spans in zip(backend.encode_batch(list(texts), add_special_tokens=False), limits, strict=True):
        numbers = np.full(len(encoding.ids), NO_SPAN, np.int32)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        for start, end in spans:
            numbers[(offsets[:, 0] < end) & (offsets[:, 1] > start)] = first
            first += 1
        marks.append(numbers)
    return marks
