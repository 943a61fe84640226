"""How the cells of a label column become numbers, which is decided once, over the whole column of the training data.

    scales = find_scales(cells, ["stars"], LabelRules())
    scales[0].describe("stars")  # label 'stars': 1 to 5 → 0 to 1 (change this with --label-range)
    labels = scale_labels(cells, ["stars"], scales)

Numbers from 0 to 1 stay as they are. Other numbers are mapped to [0, 1], percentages are divided by 100, and two
words become 0 and 1 if radq knows them. The scale is stored with a reward model, so that later files are read alike.
"""

import csv
import io
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np

from radq.data.label_cells import MISSING, NUMBER, PERCENT, WORD, LabelCells, show_number
from radq.errors import DataError, ModelError, OptionError

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
WORDS_SHOWN = 10


@dataclass(frozen=True)
class LabelScale:
    """How the cells of one label column become numbers.

    Attributes:
        words: the number of each word, in lower case; empty for a column of numbers.
        low: the number that becomes 0.
        high: the number that becomes 1.
        unit: "%" if the numbers have a percent sign, else "".
        bounded: whether numbers below `low` and above `high` are refused.
    """

    words: Mapping[str, float] = field(default_factory=dict)
    low: float = 0.0
    high: float = 1.0
    unit: str = ""
    bounded: bool = True

    def describe(self, name: str) -> str:
        """One sentence about what becomes of the labels in the column `name`."""
        if self.words:
            rising = sorted(self.words.items(), key=lambda pair: pair[1])
            numbers = ", ".join(f"{word} → {number:g}" for word, number in rising)
            return f"label {name!r}: {numbers} (change this with --label-map)"
        if (self.low, self.high, self.unit) == (0, 1, ""):
            return f"label {name!r}: {'numbers from 0 to 1' if self.bounded else 'numbers'} stay as they are"
        low, high = (f"{show_number(number)}{self.unit}" for number in (self.low, self.high))
        return f"label {name!r}: {low} to {high} → 0 to 1 (change this with --label-range)"

    def apply(self, cells: LabelCells, column: int, name: str) -> np.ndarray:
        """The labels of a column in single precision, (n,); an error names the first cell outside the scale.

        Missing labels are NaN.
        """
        known = cells.kinds[:, column] != MISSING
        if self.words:
            labels = self._look_up(cells, column)
            wrong, allowed = np.isnan(labels), f"one of {_list_words(self.words)}"
            hint = "change the label, or add it to --label-map."
        else:
            values, kinds = cells.values[:, column], cells.kinds[:, column]
            labels = (values - self.low) / (self.high - self.low)
            wrong = kinds != (PERCENT if self.unit else NUMBER)
            allowed = "a percentage" if self.unit else "a number"
            if self.bounded:
                wrong |= (values < self.low) | (values > self.high)
                allowed += f" from {show_number(self.low)}{self.unit} to {show_number(self.high)}{self.unit}"
            hint = "change the label or --label-range."
        if (wrong := wrong & known).any():
            raise _wrong_cell(cells, int(np.argmax(wrong)), column, name, allowed, hint)
        with np.errstate(over="ignore"):
            single = labels.astype(np.float32)
        if (large := known & ~np.isfinite(single)).any():
            row = int(np.argmax(large))
            raise _wrong_cell(cells, row, column, name, "between -3.4e38 and 3.4e38", "map it with --label-range.")
        return single

    def _look_up(self, cells: LabelCells, column: int) -> np.ndarray:
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
        raise ModelError(
            f"the scale of the labels in {source!r} is damaged: {error}.", "train the model again."
        ) from error
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
    try:
        parts = next(csv.reader([text], skipinitialspace=True)) if text.strip() else []
    except csv.Error as error:
        raise OptionError(f"label_map cannot be read: {error}.", "write it as negative=0,positive=1.") from error
    found: dict[str, float] = {}
    for part in parts:
        word, _, number = part.rpartition("=")
        word = _normal_key(" ".join(word.split()).casefold())
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not word or not math.isfinite(value) or word in found:
            raise OptionError(
                f"label_map must be different words with their numbers, got {part!r}.",
                "write it as negative=0,positive=1.",
            )
        found[word] = value
    return found


def _normal_key(word: str) -> str:
    """Numbers are named as `LabelCells.show` writes them: 1.0 is 1."""
    number, sign = (word[:-1], "%") if word.endswith("%") else (word, "")
    try:
        return show_number(float(number)) + sign
    except ValueError:
        return word


# --- deciding ---


def find_scales(
    cells: LabelCells, names: Sequence[str], rules: LabelRules, known: Sequence[LabelScale | None] | None = None
) -> list[LabelScale]:
    """Decide for each column, over all of its cells, how they become numbers, unless its scale is known already."""
    known = [None] * len(names) if known is None else known
    asked = [column for column, scale in enumerate(known) if scale is None]
    mapped = {column for column in asked if rules.words and _has_word_of(cells, column, rules.words)}
    if rules.words and asked and not mapped:
        raise OptionError(
            f"label_map names {_list_words(rules.words)}, and none of them is a label in {', '.join(names)}.",
            "name the words of these columns.",
        )
    return [
        scale or (LabelScale(rules.words) if column in mapped else _find_scale(cells, column, name, rules))
        for column, (name, scale) in enumerate(zip(names, known, strict=True))
    ]


def scale_labels(cells: LabelCells, names: Sequence[str], scales: Sequence[LabelScale]) -> np.ndarray:
    """Labels in single precision, (n, a); NaN where they are missing."""
    labels = np.empty((len(cells.rows), len(names)), np.float32)
    for column, (name, scale) in enumerate(zip(names, scales, strict=True)):
        labels[:, column] = scale.apply(cells, column, name)
    return labels


def _has_word_of(cells: LabelCells, column: int, words: Mapping[str, float]) -> bool:
    return not np.isnan(LabelScale(words)._look_up(cells, column)).all()


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
            f"label {name!r} runs from {show_number(low)} to {show_number(high)}, which gives no scale.",
            "give --label-range LOW HIGH, or keep the numbers with --keep-labels.",
        )
    for usual_low, usual_high in USUAL_RANGES:
        if usual_low <= low and high <= usual_high and high - low >= SPANNED * (usual_high - usual_low):
            return LabelScale(low=usual_low, high=usual_high)
    return LabelScale(low=low, high=high)


# --- errors ---


def _wrong_cell(cells: LabelCells, row: int, column: int, name: str, allowed: str, hint: str) -> DataError:
    return DataError(f"{cells.place(row)}: {name!r} must be {allowed}, got {cells.show(row, column)!r}.", hint)


def _show_kind(cells: LabelCells, row: int, column: int) -> str:
    kind = {NUMBER: "the number", PERCENT: "the percentage", WORD: "the word"}[int(cells.kinds[row, column])]
    return f"{kind} {cells.show(row, column)!r}"


def _list_words(words: Sequence[str] | Mapping[str, float]) -> str:
    shown = [word if len(word) <= 40 else f"{word[:37]}…" for word in list(words)[:WORDS_SHOWN]]
    return ", ".join(shown) + f" and {len(words) - WORDS_SHOWN} more" * (len(words) > WORDS_SHOWN)
