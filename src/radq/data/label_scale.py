"""Label columns: cells as they stand in the files, and how they become numbers, decided once over the training data.

    cells = read_cells("reviews.csv", table, ["stars"])
    scales = find_scales(cells, ["stars"], LabelRules())
    scales[0].describe("stars")  # label 'stars': 1 to 5 → 0 to 1 (change this with --label-range)
    labels = scale_labels(cells, ["stars"], scales)

Numbers from 0 to 1 stay as they are. Others are mapped to [0, 1], with outliers at its ends, percentages are divided by
100, and two words become 0 and 1 if radq knows them. The scale is stored with a reward model for later files.
Axes: n rows, a label columns.
"""

import csv
import io
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np

from radq.data.tables import Table, refuse_rows
from radq.errors import DataError, ModelError, OptionError
from radq.settings import read_number

NUMBER, PERCENT, WORD, MISSING, WRONG = range(5)  # kinds of cells; the last is refused
MAX_WORDS = 1_000  # in one piece of a table: a column with more different words holds texts, not labels
# The first word of a pair becomes 0, the second 1.
PAIRS = [
    pair.split("/")
    for pair in (
        "negative/positive neg/pos no/yes n/y false/true f/t off/on bad/good worse/better worst/best low/high "
        "ham/spam clean/toxic harmless/harmful benign/malicious dislike/like fail/pass failed/passed failure/success "
        "incorrect/correct wrong/right wrong/correct incorrect/right rejected/chosen rejected/accepted disagree/agree "
        "sad/happy impolite/polite irrelevant/relevant inappropriate/appropriate inactive/active absent/present"
    ).split()
]
NEGATION = re.compile(r"(?:not|non|no|un)[ _-]?(.+)")  # not toxic, non-toxic, unsafe
MISSING_WORDS = ("na", "n/a", "<na>", "null", "none")
# Usual scales of ratings. One of them is taken if it holds all numbers, and these span three quarters of it.
USUAL_RANGES = ((-1.0, 1.0), (1.0, 5.0), (1.0, 7.0), (1.0, 10.0), (0.0, 10.0), (0.0, 100.0))
SPANNED = 0.75
MANY = 20  # different numbers, from which on a column is measured, not rated, and may have outliers
INSIDE, WIDER = (0.01, 0.99), 1.1  # quantiles, which become 0 and 1 where the range is so many times as wide
WORDS_SHOWN = 10


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
        kind, value = int(self.kinds[n, column]), self.values[n, column]
        return _show_cell(kind, self.words[column][int(value)] if kind == WORD else value)

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


def _show_cell(kind: int, value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.12g}{'%' * (kind == PERCENT)}"


def join_cells(parts: Sequence[LabelCells]) -> LabelCells:
    """The cells of several parts, one after the other."""
    words: list[dict[str, int]] = [{} for _ in parts[0].words]  # numbers of the words of all parts, for each column
    values = [part.values.copy() for part in parts]
    for part, renumbered in zip(parts, values, strict=True):
        for column, known in enumerate(words):
            is_word = part.kinds[:, column] == WORD
            numbers = np.array([known.setdefault(word, len(known)) for word in part.words[column]], np.float64)
            renumbered[is_word, column] = numbers[part.values[is_word, column].astype(np.int64)]
    return LabelCells(
        np.concatenate([part.kinds for part in parts]),
        np.concatenate(values),
        [list(known) for known in words],
        np.concatenate([part.rows for part in parts]),
        [source for part in parts for source in part.sources],
    )


# --- reading ---


def read_cells(source: str | Path, table: Table, names: Sequence[str], may_miss: bool = False) -> LabelCells:
    """Read the label columns of a table whose index numbers its rows; refuse cells that cannot be labels."""
    kinds, values = np.empty((len(table), len(names)), np.uint8), np.empty((len(table), len(names)))
    words = []
    for column, name in enumerate(names):
        kinds[:, column], values[:, column], found = _read_column(table[name])
        if not may_miss:
            hint = "label or remove this row; radq train, distill and score go on without it by --missing-labels."
            refuse_rows(source, table, name, kinds[:, column] == MISSING, "has no label", hint)
        refuse_rows(source, table, name, kinds[:, column] == WRONG, "must be a finite number or a word")
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
        return MISSING, math.nan
    number = read_number(value) if isinstance(value, Number) else math.nan
    return WRONG if math.isnan(number) else NUMBER, number


@lru_cache(maxsize=100_000)  # most columns hold few different texts
def _parse_text(text: str) -> tuple[int, float | str]:
    """The kind of a text, and its number or word; case and whitespace do not matter."""
    text = " ".join(text.split()).casefold()
    if text in ("", "nan"):
        return MISSING, math.nan
    number = read_number(text.removesuffix("%"))
    if not math.isnan(number):
        return PERCENT if text.endswith("%") else NUMBER, number
    return (WRONG, number) if text.lstrip("+-") in ("inf", "infinity") else (WORD, text)


# --- scales ---


@dataclass(frozen=True)
class LabelScale:
    """How the cells of one label column become numbers.

    Attributes:
        words: the number of each word, in lower case; empty for a column of numbers.
        low: the number that becomes 0.
        high: the number that becomes 1.
        unit: "%" if the numbers have a percent sign, else "".
        bounded: whether numbers below `low` and above `high` are refused.
        clips: whether these become 0 and 1 instead.
    """

    words: Mapping[str, float] = field(default_factory=dict)
    low: float = 0.0
    high: float = 1.0
    unit: str = ""
    bounded: bool = True
    clips: bool = False

    def describe(self, name: str) -> str:
        """One sentence about what becomes of the labels in the column `name`."""
        if self.words:
            rising = sorted(self.words.items(), key=lambda pair: pair[1])
            numbers = ", ".join(f"{word} → {number:g}" for word, number in rising)
            return f"label {name!r}: {numbers} (change this with --label-map)"
        if (self.low, self.high, self.unit) == (0, 1, ""):
            return f"label {name!r}: {'numbers from 0 to 1' if self.bounded else 'numbers'} stay as they are"
        others = ", smaller ones → 0 and larger ones → 1" * self.clips
        return "label {!r}: {} to {} → 0 to 1{} (change this with --label-range)".format(name, *self._limits, others)

    @property
    def _limits(self) -> tuple[str, str]:
        return f"{self.low:.12g}{self.unit}", f"{self.high:.12g}{self.unit}"

    def apply(self, cells: LabelCells, column: int, name: str) -> np.ndarray:
        """The labels of a column in single precision, (n,), or NaN; an error names the first cell outside the scale."""
        known = cells.kinds[:, column] != MISSING
        if self.words:
            labels = self.look_up(cells, column)
            wrong, allowed = np.isnan(labels), f"one of {_list_words(self.words)}"
            hint = "change the label, or add it to --label-map."
        else:
            values, kinds = cells.values[:, column], cells.kinds[:, column]
            labels = (values - self.low) / (self.high - self.low)
            labels = labels.clip(0, 1) if self.clips else labels
            wrong = kinds != (PERCENT if self.unit else NUMBER)
            allowed = "a percentage" if self.unit else "a number"
            if self.bounded and not self.clips:
                wrong |= (values < self.low) | (values > self.high)
                allowed += " from {} to {}".format(*self._limits)
            hint = "change the label or --label-range."
        _refuse_cells(cells, column, name, wrong & known, allowed, hint)
        with np.errstate(over="ignore"):
            single = labels.astype(np.float32)
        large = known & ~np.isfinite(single)
        _refuse_cells(cells, column, name, large, "between -3.4e38 and 3.4e38", "map it with --label-range.")
        return single

    def look_up(self, cells: LabelCells, column: int) -> np.ndarray:
        """The numbers of cells that the scale names, (n,), and NaN for others."""
        values, kinds = cells.values[:, column], cells.kinds[:, column]
        labels = np.full(len(values), np.nan)
        for kind in (NUMBER, PERCENT, WORD):
            rows = np.flatnonzero(kinds == kind)
            _, firsts, inverse = np.unique(values[rows], return_index=True, return_inverse=True)
            known = [self.words.get(cells.show(row, column), np.nan) for row in rows[firsts].tolist()]
            labels[rows] = np.array(known, dtype=np.float64)[inverse]
        return labels


KEPT = LabelScale(bounded=False)  # numbers stay as they are, whatever their range


def read_scale(stored: Any, source: str) -> LabelScale:
    """A scale from the JSON that `dataclasses.asdict` has made of it; `source` says in errors where it stands."""
    try:
        scale = LabelScale(**stored)
        numbers = [float(number) for number in (scale.low, scale.high, *scale.words.values())]
        if scale.high <= scale.low or not all(map(math.isfinite, numbers)) or scale.unit not in ("", "%"):
            raise ValueError(f"{stored!r} is no scale")
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"the scale of the labels in {source!r} is damaged: {error}."
        raise ModelError(problem, "train the model again.") from error
    return scale


# --- what the user says ---


@dataclass(frozen=True)
class LabelRules:
    """The user's wishes about labels; without any, radq decides.

    Attributes:
        words: numbers of words, in lower case. They hold for all columns in which one of these words occurs.
        range: the numbers that become 0 and 1, for columns of numbers.
        keep: leave numbers as they are.
    """

    words: Mapping[str, float] = field(default_factory=dict)
    range: tuple[float, float] | None = None
    keep: bool = False

    @classmethod
    def parse(
        cls, label_map: str = "", label_range: tuple[float, float] | None = None, keep_labels: bool = False
    ) -> "LabelRules":
        """Check the options --label-map, --label-range and --keep-labels."""
        if label_range is not None and keep_labels:
            raise OptionError("both --label-range and --keep-labels are given.", "give one of them.")
        if label_range is not None and not 0 < label_range[1] - label_range[0] < math.inf:
            raise OptionError(
                f"label_range must be two finite numbers of which the second is larger, got {label_range}.",
                "give the lowest label, then the highest.",
            )
        words = parse_map(label_map)
        outside = [word for word, number in words.items() if not (keep_labels or 0 <= number <= 1)]
        if outside:
            raise OptionError(
                f"label_map must give numbers from 0 to 1, got {words[outside[0]]:g} for {outside[0]!r}.",
                "use numbers from 0 to 1, or add --keep-labels.",
            )
        return cls(words, label_range, keep_labels)


def parse_map(text: str) -> dict[str, float]:
    """The numbers of words in a text such as `bad=0,ok=0.5,good=1`; quotes hold a word with a comma together."""
    hint = "write it as negative=0,positive=1."
    try:
        parts = next(csv.reader([text], skipinitialspace=True)) if text.strip() else []
    except csv.Error as error:
        raise OptionError(f"label_map cannot be read: {error}.", hint) from error
    numbers: dict[str, float] = {}
    for part in parts:
        text, _, number = part.rpartition("=")
        word = _show_cell(*_parse_text(text))  # 1.0 is 1
        if not text.strip() or word in numbers or math.isnan(read_number(number)):
            raise OptionError(f"label_map must be different words with their numbers, got {part!r}.", hint)
        numbers[word] = read_number(number)
    return numbers


# --- deciding ---


def find_scales(
    cells: LabelCells, names: Sequence[str], rules: LabelRules, known: Sequence[LabelScale | None] | None = None
) -> list[LabelScale]:
    """Decide for each column, over all of its cells, how they become numbers, unless its scale is known already."""
    known = [None] * len(names) if known is None else known
    asked = [column for column, scale in enumerate(known) if scale is None]
    by_map = LabelScale(rules.words)
    mapped = {column for column in asked if rules.words and not np.isnan(by_map.look_up(cells, column)).all()}
    if rules.words and asked and not mapped:
        raise OptionError(
            f"label_map names {_list_words(rules.words)}, and none of them is a label in {', '.join(names)}.",
            "name the words of these columns.",
        )
    return [
        scale or (by_map if column in mapped else _find_scale(cells, column, name, rules))
        for column, (name, scale) in enumerate(zip(names, known, strict=True))
    ]


def scale_labels(cells: LabelCells, names: Sequence[str], scales: Sequence[LabelScale]) -> np.ndarray:
    """Labels in single precision, (n, a); NaN where they are missing."""
    labels = [scale.apply(cells, n, name) for n, (name, scale) in enumerate(zip(names, scales, strict=True))]
    return np.stack(labels, axis=1) if labels else np.empty((len(cells.rows), 0), np.float32)


def _find_scale(cells: LabelCells, column: int, name: str, rules: LabelRules) -> LabelScale:
    kinds = cells.kinds[:, column]
    known = np.flatnonzero(kinds != MISSING)
    if not len(known):
        raise DataError(f"no row has a label {name!r}.", "check the name of the column.")
    firsts = known[np.unique(kinds[known], return_index=True)[1]]  # the first row of each kind
    first, *others = np.sort(firsts).tolist()
    if others:
        raise DataError(
            f"{cells.place(others[0])}: {name!r} is {_show_kind(cells, others[0], column)}, but in "
            f"{cells.place(first)} it is {_show_kind(cells, first, column)}.",
            "write all labels in one way, or give each of them a number with --label-map.",
        )
    if kinds[first] == WORD:
        return _scale_words(cells, column, name)
    unit = "%" if kinds[first] == PERCENT else ""
    if rules.range is not None:
        return LabelScale(low=rules.range[0], high=rules.range[1], unit=unit)
    if unit:
        return LabelScale(low=0.0, high=100.0, unit=unit, bounded=not rules.keep)
    return KEPT if rules.keep else _scale_numbers(cells.values[known, column], name)


def _scale_words(cells: LabelCells, column: int, name: str) -> LabelScale:
    words = sorted(cells.words[column])
    for word in MISSING_WORDS:
        if word in words:
            row = int(np.argmax(cells.values[:, column] == cells.words[column].index(word)))
            raise DataError(
                f"{cells.place(row)}: {name!r} is {word!r}, which reads like a missing label.",
                f"remove the row, or give the word a number with --label-map {word}=0,…",
            )
    for pair in PAIRS:
        if set(words) <= set(pair):
            return LabelScale(dict(zip(pair, (0.0, 1.0), strict=True)))
    for low, high in permutations(words) if len(words) == 2 else ():
        match = NEGATION.fullmatch(low)
        if match and match[1] == high:
            return LabelScale({low: 0.0, high: 1.0})
    hint = f"give each its number from 0 to 1, for example --label-map {suggest_map(words)}"
    if len(words) == 2:
        hint = f"say which of them is 1: --label-map {suggest_map(words)}, or the other way round."
    raise DataError(
        f"label {name!r} has the word{'s' * (len(words) > 1)} {_list_words(words)}, whose numbers are not known.",
        hint if len(words) <= WORDS_SHOWN else "name a column with labels.",
    )


def suggest_map(words: Sequence[str]) -> str:
    """A map to begin with, for the shell: evenly spaced numbers, in the order of the alphabet between known words."""
    lows, highs = ({pair[side] for pair in PAIRS} for side in (0, 1))
    ordered = sorted(words, key=lambda word: ((word in highs) - (word in lows), word))
    numbers = np.linspace(0, 1, max(2, len(ordered)))
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(f"{w}={n:.3g}" for w, n in zip(ordered, numbers, strict=False))
    return shlex.quote(line.getvalue())


def _scale_numbers(values: np.ndarray, name: str) -> LabelScale:
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 1:
        return LabelScale()
    if not 0 < high - low < math.inf:
        raise DataError(
            f"label {name!r} runs from {low:.12g} to {high:.12g}, which gives no scale.",
            "give --label-range LOW HIGH, or keep the numbers with --keep-labels.",
        )
    for usual_low, usual_high in USUAL_RANGES:
        if usual_low <= low and high <= usual_high and high - low >= SPANNED * (usual_high - usual_low):
            return LabelScale(low=usual_low, high=usual_high)
    first, last = (float(f"{number:.4g}") for number in np.quantile(values, INSIDE))
    if len(np.unique(values)) > MANY and high - low > WIDER * (last - first) > 0:
        return LabelScale(low=first, high=last, clips=True)
    return LabelScale(low=low, high=high)


# --- errors ---


def _refuse_cells(cells: LabelCells, column: int, name: str, wrong: np.ndarray, allowed: str, hint: str) -> None:
    """Raise an error for the first cell of a column that is marked as wrong, (n,)."""
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(f"{cells.place(row)}: {name!r} must be {allowed}, got {cells.show(row, column)!r}.", hint)


def _show_kind(cells: LabelCells, row: int, column: int) -> str:
    kind = {NUMBER: "the number", PERCENT: "the percentage", WORD: "the word"}[int(cells.kinds[row, column])]
    return f"{kind} {cells.show(row, column)!r}"


def _list_words(words: Sequence[str] | Mapping[str, float]) -> str:
    shown = [word if len(word) <= 40 else f"{word[:37]}…" for word in list(words)[:WORDS_SHOWN]]
    return ", ".join(shown) + f" and {len(words) - WORDS_SHOWN} more" * (len(words) > WORDS_SHOWN)
