"""The run folders that `radq eval` writes, as a report reads them.

    run = read_runs([Path("runs/detox")])[0]
    run.results[0].metrics["avg_max"].value

metrics.jsonl has a line per cell (a setting of the sweep) and class of prompts, costs.jsonl the cost of each cell,
differences.jsonl a line per pair of guides, generations.jsonl a line per cell and prompt. A killed sweep may leave a
last line without an end: it is left out, with a note. Names and texts come from models and strangers: characters that
cannot be shown are replaced on reading. published.csv holds every number of the paper's
tables, under radq's names of metrics, as curves to be drawn beside those of a run.
"""

import csv
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from radq.errors import DataError, OptionError
from radq.evaluation.comparison import AXES
from radq.evaluation.estimates import Estimate
from radq.evaluation.metrics import METRICS
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


@dataclass(frozen=True)
class GuideDifference:
    """The difference of a metric between two guides at equal perplexity or KL, first minus second.

    The value is NaN where the guides have no common range.
    """

    first: str
    second: str
    metric: str
    group: str
    value: float
    low: float
    high: float
    range: tuple[float, float]  # of perplexity or KL, reached by both guides
    prompts: int | None = None
    setting: str = ""  # candidates and seed, such as ", k=20, seed=0", where a run has several
    reason: str = ""  # why the value is NaN, where the run tells
    axis: str = "perplexity"  # or "kl"


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
    differences: list[GuideDifference]
    notes: list[str] = field(default_factory=list)  # to be shown to the readers of a report

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the sweep; empty where config.yaml is missing or damaged."""
        try:
            settings = yaml.safe_load(self.config or "")
        except yaml.YAMLError:
            return {}
        return settings if isinstance(settings, dict) else {}


def metric_and_judge(key: str) -> tuple[str, str]:
    """Split avg_max[judge] into avg_max and the judge, which is empty where the key names none."""
    metric, _, judge = key.partition("[")
    return metric, judge.removesuffix("]")


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

    def renamed(guide: str) -> str:
        return f"{run.name}/{guide}" if guide in clashing else guide

    results = [replace(result, guide=renamed(result.guide)) for result in run.results]
    pairs = [replace(pair, first=renamed(pair.first), second=renamed(pair.second)) for pair in run.differences]
    return replace(run, results=results, differences=pairs)


def _read_run(folder: Path, name: str) -> Run:
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"{str(folder)!r} has no metrics.jsonl.", "give a folder that radq eval has written.")
    notes: list[str] = []
    results: dict[tuple[str, str], Result] = {}
    costs = read_costs(folder)
    for place, row in _rows(folder / "metrics.jsonl", notes):
        result = _read_result(place, row, name, costs)
        if (result.cell, result.group) in results:
            notes.append(f"{place}: the cell {result.cell!r} is there twice; the later line counts.")
        results[result.cell, result.group] = result
    if not results:
        raise DataError(f"{str(folder / 'metrics.jsonl')!r} has no results.", "let radq eval finish a cell first.")
    pairs = list(_rows(folder / "differences.jsonl", notes))
    several = len({_describe_setting(row) for _, row in pairs}) > 1
    differences = [_read_difference(place, row, _describe_setting(row) if several else "") for place, row in pairs]
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
        scores = _Scores(run)
        for place, row in _rows(run.folder / "generations.jsonl", run.notes):
            group, cell, prompt = _name(place, row, "group"), _name(place, row, "cell"), _text(place, row, "text")
            found = chosen.setdefault(group, {})
            if cell in cells and (prompt in found or len(found) < prompts):
                sample = found.setdefault(prompt, PromptSamples(group, prompt, {}))
                texts = _texts(place, row, "continuations")[:continuations]
                index = _integer(place, row, "prompt")
                sample.continuations[run.name, cell] = [
                    Sample(printable(text), scores.of(_text(place, row, "cell"), index, n))
                    for n, text in enumerate(texts)
                ]
    return [sample for found in chosen.values() for sample in found.values()]


class _Scores:
    """The scores of single texts in measures/ of a run. Those of the last cell are kept, since lines come by cell."""

    def __init__(self, run: Run):
        self.run = run
        self._cell: str | None = None
        self._arrays: dict[str, np.ndarray] = {}  # by judge, (p, n)

    def of(self, cell: str, prompt: int, sample: int) -> dict[str, float]:
        """Return the scores of a sample by judge; blank texts have none."""
        if cell != self._cell:
            self._cell, self._arrays = cell, self._read(cell)
        known = {
            judge: float(scores[prompt, sample])
            for judge, scores in self._arrays.items()
            if 0 <= prompt < scores.shape[0] and sample < scores.shape[1]
        }
        return {judge: score for judge, score in known.items() if isfinite(score)}

    def _read(self, cell: str) -> dict[str, np.ndarray]:
        if not (self.run.folder / "measures").is_dir():
            return {}
        try:
            arrays = read_arrays(self.run.folder, cell)
        except DataError as error:
            self.run.notes.append(f"{error.message} Its texts have no scores here.")
            return {}
        judged = {name: array for name, array in arrays.items() if name.startswith("scores[")}
        return {
            metric_and_judge(printable(name))[1]: scores
            for name, scores in judged.items()
            if scores.ndim == 2 and scores.dtype.kind in "fiu"
        }


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


def _rows(file: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read each line with its place in the file, for errors; a missing file has no lines, and adds a note."""
    if not file.is_file():
        notes.append(f"{str(file.parent)!r} has no {file.name}.")
        return
    for number, row in read_numbered_lines(file, notes):
        place = f"{file}, line {number}"
        if not isinstance(row, dict):
            raise _wrong(place, "the line", row, "an object")
        yield place, row


def _read_result(place: str, row: dict[str, Any], run: str, costs: dict[str, dict[str, float]]) -> Result:
    guide = _name(place, row, "guide")
    return Result(
        run=run,
        cell=_name(place, row, "cell"),
        guide=guide,
        unguided=guide == UNGUIDED,
        beta=_optional(place, row, "beta"),
        top_k=_optional_integer(place, row, "top_k"),
        top_p=_optional(place, row, "top_p"),
        kl_budget=_optional(place, row, "kl_budget"),
        seed=_integer(place, row, "seed"),
        group=_name(place, row, "group"),
        metrics=_read_estimates(place, "metrics", row.get("metrics")),
        cost=costs.get(_text(place, row, "cell"), {}),
        best_of=_optional_integer(place, row, "best_of"),
        ask=_optional_integer(place, row, "ask"),
        prompts=_optional_integer(place, row, "prompts"),
        samples=_optional_integer(place, row, "samples"),
        changes=_read_estimates(place, "changes", row.get("changes", {})),
    )


def _read_estimates(place: str, name: str, values: Any) -> dict[str, Estimate]:
    if not isinstance(values, dict):
        raise _wrong(place, name, values, "an object")
    return {_metric(place, key): _read_estimate(place, key, value) for key, value in values.items()}


def _read_estimate(place: str, key: str, value: Any) -> Estimate:
    if value is None:
        return Estimate(NAN, NAN, NAN)
    if not isinstance(value, dict):
        raise _wrong(place, key, value, "an object with value, low and high")
    middle, low, high = (_number(place, value, name) for name in ("value", "low", "high"))
    skipped, infinite = (_integer(place, {name: value.get(name) or 0}, name) for name in ("skipped", "infinite"))
    return Estimate(middle, low, high, skipped, infinite)


def _describe_setting(row: dict[str, Any]) -> str:
    """Name the candidates and the seed of a pair, which tell pairs of the same guides apart."""
    names = {"top_k": "k", "top_p": "p", "kl_budget": "kl", "seed": "seed"}
    return "".join(f", {short}={row[name]}" for name, short in names.items() if row.get(name) is not None)


def _read_difference(place: str, row: dict[str, Any], setting: str) -> GuideDifference:
    axis = _name(place, row, "axis") if "axis" in row else "perplexity"  # older runs know no other
    if axis not in AXES:
        raise _wrong(place, "axis", axis, f"one of {', '.join(AXES)}")
    name = "range" if "range" in row else "perplexity"  # as older runs call it
    limits = row.get(name) or [None, None]
    if not isinstance(limits, list) or len(limits) != 2:
        raise _wrong(place, name, limits, "the two ends of the common range")
    low, high = (_number(place, {name: limit}, name) for limit in limits)
    return GuideDifference(
        first=_name(place, row, "first"),
        second=_name(place, row, "second"),
        metric=_metric(place, _name(place, row, "metric")),
        group=_name(place, row, "group"),
        value=_number(place, row, "value"),
        low=_number(place, row, "low"),
        high=_number(place, row, "high"),
        range=(low, high),
        prompts=_optional_integer(place, row, "prompts"),
        setting=printable(setting),
        reason="" if row.get("reason") is None else _name(place, row, "reason").removesuffix("."),
        axis=axis,
    )


def _metric(place: str, key: str) -> str:
    name, _ = metric_and_judge(key)
    if name not in METRICS:
        raise DataError(f"{place}: there is no metric {name!r}.", f"choose from {', '.join(METRICS)}.")
    return " ".join(printable(key).split())


def _text(place: str, row: dict[str, Any], name: str) -> str:
    if not isinstance(row.get(name), str):
        raise _wrong(place, name, row.get(name), "a text")
    return printable(row[name])


def _texts(place: str, row: dict[str, Any], name: str) -> list[str]:
    texts = row.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _wrong(place, name, texts, "a list of texts")
    return texts


def _name(place: str, row: dict[str, Any], name: str) -> str:
    return " ".join(_text(place, row, name).split())


def _optional(place: str, row: dict[str, Any], name: str) -> float | None:
    number = row.get(name)
    if number is not None and not isinstance(number, int | float):
        raise _wrong(place, name, number, "a number or null")
    return None if number is None or number != number else number


def _number(place: str, row: dict[str, Any], name: str) -> float:
    number = _optional(place, row, name)
    return NAN if number is None else float(number)


def _optional_integer(place: str, row: dict[str, Any], name: str) -> int | None:
    return None if row.get(name) is None else _integer(place, row, name)


def _integer(place: str, row: dict[str, Any], name: str) -> int:
    number = _optional(place, row, name)
    if number is None or not isfinite(number) or number != int(number):
        raise _wrong(place, name, row.get(name), "a whole number")
    return int(number)


def _wrong(place: str, name: str, value: Any, wanted: str) -> DataError:
    found = repr(value)
    found = found if len(found) <= 60 else f"{found[:57]}…"
    return DataError(f"{place}: {name} must be {wanted}, got {found}.", "correct the line, or run radq eval again.")


PERCENT = ("positive_rate",)  # printed as percentages in the paper
BASES = ("GPT-2-Large", "LLaMA-2-7b", "LLaMA-2-13b")
TOXICITY_JUDGES = ("Perspective", "ToxicityModel")


@dataclass(frozen=True)
class PublishedCurve:
    """The numbers of one method in the paper, by β."""

    method: str
    top_k: int | None  # None for LLaMA, where the paper does not name it
    base: str
    judge: str
    points: tuple[tuple[float, float, float], ...]  # β, fluency, attribute

    @property
    def label(self) -> str:
        setting = "" if self.top_k is None else f", k={self.top_k}"
        return f"{self.method}{setting} (paper: {self.base}, {self.judge})"


def find_published(
    metric: str,
    fluency: str,
    group: str,
    base: str = "GPT-2-Large",
    judge: str = "Perspective",
    top_ks: Collection[int] = (),
) -> list[PublishedCurve]:
    """Find the paper's curves of a metric against perplexity or MAUVE.

    Where the paper has curves for one of `top_ks`, only these are returned. `judge` chooses among the two judges of
    toxicity; sentiment has one judge. The paper's toxicity is that of nontoxic prompts, and is returned for any class;
    its positive rates are returned for classes with the paper's names, such as "neutral".
    """
    rows = [row for row in _published_rows() if row["metric"] == metric and row["base"] == base]
    if metric == "positive_rate":
        rows = [row for row in rows if row["prompts"] in group.lower()]
    else:
        rows = [row for row in rows if row["judge"] == judge]
    if any(_top_k(row) in top_ks for row in rows):
        rows = [row for row in rows if _top_k(row) in top_ks]
    fluencies = {_setting(row): float(row["value"]) for row in _published_rows() if row["metric"] == fluency}
    scale = 0.01 if metric in PERCENT else 1.0
    found: dict[tuple[str, int | None, str], list[tuple[float, float, float]]] = {}
    for row in rows:
        point = (float(row["beta"]), fluencies.get(_setting(row), float("nan")), scale * float(row["value"]))
        if all(map(isfinite, point)):
            found.setdefault((row["method"], _top_k(row), row["judge"]), []).append(point)
    return [PublishedCurve(m, k, base, j, tuple(sorted(points))) for (m, k, j), points in found.items()]


def find_named(names: Collection[str], text: str) -> str:
    """Find the first of the paper's names that a text mentions, else return the first name."""
    plain = text.lower().replace("-hf", "")
    return next((name for name in names if name.lower() in plain), next(iter(names)))


def published_calls() -> str:
    """List the calls of experts per generated token, as the paper counts them."""
    rows = [row for row in _published_rows() if row["metric"] == "calls"]
    return ", ".join(f"{row['method']} {'k' if row['value'] == 'nan' else row['value']}" for row in rows)


def _top_k(row: dict[str, str]) -> int | None:
    return int(row["top_k"]) if row["top_k"] else None


def _setting(row: dict[str, str]) -> tuple[str, ...]:
    """The columns that identify a run of the paper. Judges and classes of prompts share its perplexity and MAUVE."""
    return tuple(row[name] for name in ("task", "base", "method", "top_k", "beta"))


@cache
def _published_rows() -> tuple[dict[str, str], ...]:
    text = (files("radq.report") / "published.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))
