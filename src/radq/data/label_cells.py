"""Label columns as they stand in the files: numbers, percentages and words, with the places of their rows.

    cells = read_cells("reviews.csv", table, ["stars"])
    cells.show(0, 0), cells.place(0)  # '5', 'reviews.csv, row 1'

`radq.data.label_scale` decides over all cells of a column how they become numbers. Axes: n rows, a label columns.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np

from radq.data.tables import Table, refuse_rows
from radq.errors import DataError

NUMBER, PERCENT, WORD, MISSING, WRONG = range(5)  # kinds of cells; the last is refused
MAX_WORDS = 1_000  # in one piece of a table: a column with more different words holds texts, not labels


@dataclass(frozen=True)
class LabelCells:
    """The cells of all label columns.

    Attributes:
        kinds: NUMBER, PERCENT or WORD for each cell; MISSING where a label may be missing.
        values: the number, without its percent sign; for a word its place in `words`; NaN for a missing label.
        words: the different words of each column, in lower case.
        rows: the number of each row in its source, from 1.
        sources: the names of the sources, in order, with their numbers of rows.
    """

    kinds: np.ndarray  # (n, a)
    values: np.ndarray  # (n, a)
    words: list[list[str]]
    rows: np.ndarray  # (n,)
    sources: list[tuple[str, int]]

    def place(self, n: int) -> str:
        """The source and the row from which the n-th row comes."""
        ends = np.cumsum([count for _, count in self.sources])
        return f"{self.sources[int(np.searchsorted(ends, n, side='right'))][0]}, row {self.rows[n]}"

    def show(self, n: int, column: int) -> str:
        """One cell as a text, as a map of labels names it."""
        value = self.values[n, column]
        if self.kinds[n, column] == WORD:
            return self.words[column][int(value)]
        return show_number(value) + "%" * bool(self.kinds[n, column] == PERCENT)

    @property
    def groups(self) -> np.ndarray:
        """A number for each row here, (n,), which only those share that come from the same row of the same source."""
        is_first = np.diff(self.rows, prepend=-1) != 0
        ends = np.cumsum([count for _, count in self.sources])
        is_first[ends[ends < len(is_first)]] = True
        return np.cumsum(is_first) - 1

    def save(self, folder: Path) -> None:
        np.save(folder / "label_kinds.npy", self.kinds)
        np.save(folder / "label_values.npy", self.values)
        np.save(folder / "row_numbers.npy", self.rows)
        (folder / "labels.json").write_text(json.dumps({"words": self.words, "sources": self.sources}))

    @staticmethod
    def load(folder: Path) -> "LabelCells":
        kinds, values, rows = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("label_kinds", "label_values", "row_numbers")
        )
        stored = json.loads((folder / "labels.json").read_text())
        return LabelCells(kinds, values, stored["words"], rows, [tuple(source) for source in stored["sources"]])


def show_number(number: float) -> str:
    return f"{number:.12g}"


def join_cells(parts: Sequence[LabelCells]) -> LabelCells:
    """The cells of several parts, one after the other."""
    by_column = zip(*(part.words for part in parts), strict=True)
    words = [list(dict.fromkeys(word for found in column for word in found)) for column in by_column]
    places = [{word: place for place, word in enumerate(column)} for column in words]
    return LabelCells(
        np.concatenate([part.kinds for part in parts]),
        np.concatenate([_renumber_words(part, places) for part in parts]),
        words,
        np.concatenate([part.rows for part in parts]),
        [source for part in parts for source in part.sources],
    )


def _renumber_words(part: LabelCells, places: list[dict[str, int]]) -> np.ndarray:
    """The values of a part, (n, a), with new places of its words."""
    values = part.values.copy()
    for column, found in enumerate(part.words):
        is_word = part.kinds[:, column] == WORD
        new = np.array([places[column][word] for word in found], dtype=np.float64)
        values[is_word, column] = new[values[is_word, column].astype(np.int64)]
    return values


# --- reading ---


def read_cells(source: str | Path, table: Table, names: Sequence[str], may_miss: bool = False) -> LabelCells:
    """Read the label columns of a table whose index numbers its rows; refuse cells that cannot be labels.

    Labels may be missing if `may_miss`.
    """
    kinds, values = np.empty((len(table), len(names)), np.uint8), np.empty((len(table), len(names)))
    words = []
    for column, name in enumerate(names):
        kinds[:, column], values[:, column], found = _read_column(table[name])
        if not may_miss:
            _refuse_missing(source, table, name, kinds[:, column] == MISSING)
        refuse_rows(source, table, name, kinds[:, column] == WRONG, "a finite number or a word")
        if len(found) > MAX_WORDS:
            raise DataError(
                f"{source}: {name!r} holds more than {MAX_WORDS} different words, such as {found[0][:40]!r}.",
                "name a column with labels.",
            )
        words.append(found)
    return LabelCells(kinds, values, words, np.asarray(table.index, np.int64), [(str(source), len(table))])


def _read_column(column: Any) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Kinds and values of the cells of a column, both (n,), and its different words."""
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    if is_numeric_dtype(column.dtype) and not is_bool_dtype(column.dtype):
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
        return np.where(np.isfinite(values), NUMBER, np.where(np.isnan(values), MISSING, WRONG)), values, []
    cells = [_parse(value) for value in column]
    words: dict[str, int] = {}
    values = [words.setdefault(value, len(words)) if isinstance(value, str) else value for _, value in cells]
    return np.array([kind for kind, _ in cells], np.uint8), np.array(values, np.float64), list(words)


def _parse(value: Any) -> tuple[int, float | str]:
    """The kind of a cell, and its number or word."""
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, bool | np.bool_):
        return WORD, str(bool(value)).lower()
    from pandas import isna
    from pandas.api.types import is_scalar

    if is_scalar(value) and isna(value):
        return MISSING, np.nan
    return _parse_number(value) if isinstance(value, Number) else (WRONG, np.nan)


@lru_cache(maxsize=100_000)  # most columns hold few different texts
def _parse_text(text: str) -> tuple[int, float | str]:
    """Case and whitespace do not matter."""
    text = " ".join(text.split()).casefold()
    if text in ("", "nan"):
        return MISSING, np.nan
    if text.endswith("%") and _parse_number(text[:-1])[0] == NUMBER:
        return PERCENT, float(text[:-1])
    kind, number = _parse_number(text)
    return (kind, number) if kind == NUMBER or text.lstrip("+-") in ("inf", "infinity") else (WORD, text)


def _parse_number(value: Any) -> tuple[int, float]:
    try:
        number = np.nan if "_" in str(value) else float(value)  # Python would read 1_0 as 10
    except (OverflowError, TypeError, ValueError):
        number = np.nan
    return (NUMBER, number) if np.isfinite(number) else (WRONG, np.nan)


def _refuse_missing(source: str | Path, table: Table, name: str, missing: np.ndarray) -> None:
    if missing.any():
        row = table.index[int(np.argmax(missing))]
        value = table[name].iloc[int(np.argmax(missing))]
        raise DataError(
            f"{source}, row {row}: {name!r} has no label, got {value!r}.",
            "label or remove this row; radq train, distill and score go on without it by --missing-labels.",
        )
