"""The run folders that `radq eval` writes, as a report reads them.

    run = read_runs([Path("runs/detox")])[0]
    run.results[0].metrics["avg_max"].value

metrics.jsonl has a line per cell (a setting of the sweep) and class of prompts, costs.jsonl the cost of each cell,
differences.jsonl a line per pair of guides, generations.jsonl a line per cell and prompt. A killed sweep may leave a
last line without an end: it is left out, with a note. Names and texts come from models and strangers: characters that
cannot be shown are replaced on reading.
"""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from radq.errors import DataError, OptionError
from radq.evaluation.comparison import AXES
from radq.evaluation.estimates import Estimate
from radq.evaluation.metrics import METRICS, metric_and_judge
from radq.evaluation.sweep.config import UNGUIDED
from radq.evaluation.sweep.folder import read_arrays, read_costs
from radq.files import read_numbered_lines

NAN = float("nan")


@dataclass(frozen=True)
class Result:
    """The metrics and costs of one cell on one class of prompts."""

    run: str
    cell: str
    guide: str
    unguided: bool
    beta: float | None
    top_k: int | None
    top_p: float | None
    kl_budget: float | None
    seed: int
    group: str
    metrics: dict[str, Estimate]  # by metric, or by metric[judge]
    cost: dict[str, float]
    best_of: int | None = None  # the n of the best of n
    ask: int | None = None  # the number of the request to the base model
    prompts: int | None = None  # the number of prompts of this class; runs of older versions do not tell
    samples: int | None = None  # of each prompt
    changes: dict[str, Estimate] = field(default_factory=dict)  # of the metrics, from the unguided base model


BETTER, WORSE, HIGHER, LOWER = "better than", "worse than", "higher than", "lower than"
ALIKE, UNKNOWN = "not told apart from", "not compared with"


@dataclass(frozen=True)
class Comparison:
    """A metric of one guide minus that of another at equal perplexity or KL; NaN where they have no common range."""

    run: str
    ours: str
    other: str
    metric: str
    group: str
    difference: Estimate
    range: tuple[float, float]  # of perplexity or KL, reached by both guides
    prompts: int | None = None
    better_side: int = 0  # +1 where more of the metric is better, −1 where less is, 0 where that is not known
    reason: str = ""  # why the guides cannot be compared, where the run tells
    axis: str = "perplexity"  # or "kl"
    setting: str = ""  # candidates and seed, such as ", k=20, seed=0", where a run has several

    @property
    def place(self) -> str:
        """The class of prompts, with candidates and seed where a run has several."""
        return self.group + self.setting

    @property
    def axis_noun(self) -> str:
        return AXES[self.axis].noun

    @property
    def is_known(self) -> bool:
        return isfinite(self.difference.value)

    @property
    def doubt(self) -> str:
        """The reason why the difference decides nothing; empty where it decides."""
        return self.difference.doubt(self.prompts)

    @property
    def word(self) -> str:
        """The words that say how our guide stands to the other one."""
        if not self.is_known:
            return UNKNOWN
        if self.doubt:
            return ALIKE
        side = 1 if self.difference.low > 0 else -1
        if not self.better_side:
            return HIGHER if side > 0 else LOWER
        return BETTER if side == self.better_side else WORSE

    @property
    def verdict(self) -> str:
        """The words with the other guide's name, and the reason where nothing was decided."""
        why = self.doubt if self.is_known else self.reason or "the run gives no reason"
        return f"{self.word} {self.other}{f': {why}' if why else ''}"

    def turn(self) -> "Comparison":
        """Compare the other guide with ours."""
        value, low, high = -self.difference.value, -self.difference.high, -self.difference.low
        return replace(self, ours=self.other, other=self.ours, difference=Estimate(value, low, high))


@dataclass(frozen=True)
class Sample:
    """A continuation, and its scores by the name of the judge."""

    text: str
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptSamples:
    """A prompt and some of its continuations by each cell."""

    group: str
    prompt: str
    continuations: dict[tuple[str, str], list[Sample]]  # by run and cell


@dataclass(frozen=True)
class Run:
    """The contents of a run folder, without its texts."""

    name: str
    folder: Path
    config: str | None
    results: list[Result]
    differences: list[Comparison]  # of pairs of guides
    notes: list[str] = field(default_factory=list)  # to be shown to the readers of a report

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the sweep; empty where config.yaml is missing or damaged."""
        try:
            settings = yaml.safe_load(self.config or "")
        except yaml.YAMLError:
            return {}
        return settings if isinstance(settings, dict) else {}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders. A guide's name that occurs in several runs gets the folder's name in front."""
    if not folders:
        raise OptionError("there is no run to report.", "give a folder that radq eval has written.")
    resolved = [folder.resolve() for folder in folders]
    twice = [folder for folder, count in Counter(resolved).items() if count > 1]
    if twice:
        raise OptionError(f"{str(twice[0])!r} is given twice.", "name each run once.")
    names = [folder.name for folder in resolved]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs = [_read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    guides = Counter(guide for run in runs for guide in {result.guide for result in run.results})
    return [_with_prefix(run, {guide for guide, count in guides.items() if count > 1}) for run in runs]


def _with_prefix(run: Run, clashing: set[str]) -> Run:
    """Put the run's name in front of guides whose names occur in other runs as well."""

    def rename(guide: str) -> str:
        return f"{run.name}/{guide}" if guide in clashing else guide

    results = [replace(result, guide=rename(result.guide)) for result in run.results]
    pairs = [replace(pair, ours=rename(pair.ours), other=rename(pair.other)) for pair in run.differences]
    return replace(run, results=results, differences=pairs)


def _read_run(folder: Path, name: str) -> Run:
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"{str(folder)!r} has no metrics.jsonl.", "give a folder that radq eval has written.")
    notes: list[str] = []
    results: dict[tuple[str, str], Result] = {}
    costs = read_costs(folder)
    for row in _rows(folder / "metrics.jsonl", notes):
        result = _read_result(row, name, costs)
        if (result.cell, result.group) in results:
            notes.append(f"{row.place}: the cell {result.cell!r} is there twice; the later line counts.")
        results[result.cell, result.group] = result
    if not results:
        raise DataError(f"{str(folder / 'metrics.jsonl')!r} has no results.", "let radq eval finish a cell first.")
    pairs = list(_rows(folder / "differences.jsonl", notes))
    several = len({row.setting for row in pairs}) > 1
    differences = [_read_comparison(row, name, row.setting if several else "") for row in pairs]
    config = folder / "config.yaml"
    text = printable(config.read_text(encoding="utf-8", errors="replace")) if config.is_file() else None
    return Run(name, folder, text, list(results.values()), differences, notes)


def read_samples(runs: Sequence[Run], prompts: int = 5, continuations: int = 3) -> list[PromptSamples]:
    """Read the first prompts of each class in generations.jsonl, with their continuations by all measured cells.

    The files may be larger than memory: they are read line by line, and only the returned texts are kept. Scores come
    from measures/. A missing or partial file adds a note to its run.
    """
    chosen: dict[str, dict[str, PromptSamples]] = {}
    for run in runs:
        cells = {result.cell for result in run.results}
        last, scores = "", {}  # lines come by cell
        for row in _rows(run.folder / "generations.jsonl", run.notes):
            group, cell, prompt = row.name("group"), row.name("cell"), row.text("text")
            here = chosen.setdefault(group, {})
            if cell in cells and (prompt in here or len(here) < prompts):
                if (name := row.text("cell")) != last:
                    last, scores = name, _read_scores(run, name)
                texts = row.values.get("continuations")
                if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                    raise row.wrong("continuations", texts, "a list of texts")
                index = row.integer("prompt")
                samples = here.setdefault(prompt, PromptSamples(group, prompt, {}))
                samples.continuations[run.name, cell] = [
                    Sample(printable(text), _find_scores(scores, index, n))
                    for n, text in enumerate(texts[:continuations])
                ]
    return [samples for here in chosen.values() for samples in here.values()]


def _read_scores(run: Run, cell: str) -> dict[str, np.ndarray]:
    """Read the scores of a cell by judge, (p, n); none where measures/ does not hold them."""
    if not (run.folder / "measures").is_dir():
        return {}
    try:
        arrays = read_arrays(run.folder, cell)
    except DataError as error:
        run.notes.append(f"{error.message} Its texts have no scores here.")
        return {}
    return {
        metric_and_judge(printable(name))[1]: scores
        for name, scores in arrays.items()
        if name.startswith("scores[") and scores.ndim == 2 and scores.dtype.kind in "fiu"
    }


def _find_scores(arrays: dict[str, np.ndarray], prompt: int, sample: int) -> dict[str, float]:
    """Find the scores of a sample by judge; blank texts have none."""
    known = {
        judge: float(scores[prompt, sample])
        for judge, scores in arrays.items()
        if 0 <= prompt < scores.shape[0] and sample < scores.shape[1]
    }
    return {judge: score for judge, score in known.items() if isfinite(score)}


def printable(text: str) -> str:
    """Replace control characters and halves of surrogate pairs, which neither XML nor UTF-8 can hold."""
    return "".join(
        "\ufffd" if unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t" else character
        for character in text
    )


def unique(values: Iterable[str]) -> list[str]:
    """Remove repeated values, and keep the order."""
    return list(dict.fromkeys(values))


# --- lines ---


class Row(NamedTuple):
    """A line of a file, with its place there for errors."""

    place: str
    values: dict[str, Any]

    def wrong(self, name: str, value: Any, wanted: str) -> DataError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
        hint = "correct the line, or run radq eval again."
        return DataError(f"{self.place}: {name} must be {wanted}, got {shown}.", hint)

    def text(self, name: str) -> str:
        text = self.values.get(name)
        if not isinstance(text, str):
            raise self.wrong(name, text, "a text")
        return printable(text)

    def name(self, name: str) -> str:
        return " ".join(self.text(name).split())

    def metric(self, key: str) -> str:
        name, _ = metric_and_judge(key)
        if name not in METRICS:
            raise DataError(f"{self.place}: there is no metric {name!r}.", f"choose from {', '.join(METRICS)}.")
        return " ".join(printable(key).split())

    def number(self, name: str) -> float | None:
        """A number; None where it is missing or NaN."""
        number = self.values.get(name)
        if number is not None and not isinstance(number, int | float):
            raise self.wrong(name, number, "a number or null")
        return None if number is None or number != number else number

    def integer(self, name: str) -> int:
        number = self.number(name)
        if number is None or not isfinite(number) or number != int(number):
            raise self.wrong(name, self.values.get(name), "a whole number")
        return int(number)

    def optional_integer(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.integer(name)

    def estimates(self, name: str) -> dict[str, Estimate]:
        """Estimates of metrics; null stands for one that is unknown."""
        found = {}
        values = self.values.get(name, {})
        if not isinstance(values, dict):
            raise self.wrong(name, values, "an object")
        for key, value in values.items():
            if not isinstance(value, dict | None):
                raise self.wrong(key, value, "an object with value, low and high")
            found[self.metric(key)] = Row(self.place, value or {}).estimate()
        return found

    def estimate(self) -> Estimate:
        """A value with the ends of its interval, and the numbers of samples that are left out."""
        value, low, high = (NAN if end is None else float(end) for end in map(self.number, ("value", "low", "high")))
        skipped, infinite = (self.optional_integer(name) or 0 for name in ("skipped", "infinite"))
        return Estimate(value, low, high, skipped, infinite)

    @property
    def setting(self) -> str:
        """The candidates and the seed of a pair, which tell pairs of the same guides apart."""
        names = {"top_k": "k", "top_p": "p", "kl_budget": "kl", "seed": "seed"}
        known = {short: self.values.get(name) for name, short in names.items()}
        return printable("".join(f", {short}={value}" for short, value in known.items() if value is not None))


READERS: dict[Any, Callable[[Row, str], Any]] = {  # by the type of a field
    str: Row.name,
    int: Row.integer,
    int | None: Row.optional_integer,
    float | None: Row.number,
    dict[str, Estimate]: Row.estimates,
}


def _rows(file: Path, notes: list[str]) -> Iterator[Row]:
    """Read each line; a missing file has no lines, and adds a note."""
    if not file.is_file():
        notes.append(f"{str(file.parent)!r} has no {file.name}.")
        return
    for number, values in read_numbered_lines(file, notes):
        row = Row(f"{file}, line {number}", values)
        if not isinstance(values, dict):
            raise row.wrong("the line", values, "an object")
        yield row


def _read_result(row: Row, run: str, costs: dict[str, dict[str, float]]) -> Result:
    cost = costs.get(row.text("cell"), {})
    known: dict[str, Any] = {"run": run, "unguided": row.name("guide") == UNGUIDED, "cost": cost}
    others = (field for field in fields(Result) if field.name not in known)
    return Result(**known, **{field.name: READERS[field.type](row, field.name) for field in others})


def _read_comparison(row: Row, run: str, setting: str) -> Comparison:
    axis = row.name("axis") if "axis" in row.values else "perplexity"  # older runs know no other
    if axis not in AXES:
        raise row.wrong("axis", axis, f"one of {', '.join(AXES)}")
    name = "range" if "range" in row.values else "perplexity"  # as older runs call it
    limits = row.values.get(name) or [None, None]
    if not isinstance(limits, list) or len(limits) != 2:
        raise row.wrong(name, limits, "the two ends of the common range")
    ends = (Row(row.place, {name: limit}).number(name) for limit in limits)
    low, high = (NAN if end is None else float(end) for end in ends)
    return Comparison(
        run=run,
        ours=row.name("first"),
        other=row.name("second"),
        metric=row.metric(row.name("metric")),
        group=row.name("group"),
        difference=row.estimate(),
        range=(low, high),
        prompts=row.optional_integer("prompts"),
        reason="" if row.values.get("reason") is None else row.name("reason").removesuffix("."),
        axis=axis,
        setting=setting,
    )
