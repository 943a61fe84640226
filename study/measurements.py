"""The stored measurements of a study, read from its folder. Parts that were not run are empty or None.

sweeps/detox-k20, sentiment-k20, …   run folders of `radq eval`
judges/NAME.json                     quality of a judge: {metrics: {spearman, auc, accuracy}, …}
rank/NAME.json                       output of `radq rank model --json`: toxicity-v, toxicity-q, …
expressivity/v.txt, q.txt            output of recipes/expressivity.py
timing.json                          times of `radq bench`, as run.py keeps them
samples.jsonl                        {attribute, prompt, beta, unguided, guided} a line
models/NAME.json, mauve.jsonl, pieces.jsonl: for LOG.md; not read here
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from radq.errors import DataError, OptionError
from radq.evaluation.estimates import Estimate
from radq.files import read_lines
from radq.report.results import NAN, Result, read_runs

UNKNOWN = Estimate(NAN, NAN, NAN)


@dataclass(frozen=True)
class Difference:
    """A metric of the first guide minus that of the second, at equal perplexity."""

    first: str
    second: str
    metric: str
    group: str
    top_k: int | None
    estimate: Estimate  # NaN where the two guides never have the same perplexity

    @property
    def reversed(self) -> "Difference":
        e = self.estimate
        return replace(self, first=self.second, second=self.first, estimate=Estimate(-e.value, -e.high, -e.low))


@dataclass(frozen=True)
class MeasuredSweep:
    results: list[Result]
    differences: list[Difference]

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(result.group for result in self.results))

    @property
    def top_ks(self) -> list[int | None]:
        return sorted({result.top_k for result in self.results}, key=lambda k: k or 0)

    def compare(self, first: str, second: str, metric: str) -> dict[tuple[str, int | None], Estimate]:
        """First guide minus second at equal perplexity, by group of prompts and top_k."""
        both = [*self.differences, *(one.reversed for one in self.differences)]
        found = [one for one in both if (one.first, one.second, one.metric) == (first, second, metric)]
        return {(one.group, one.top_k): one.estimate for one in found}

    def select(self, guide: str, group: str, top_k: int | None, beta: float | None = None) -> list[Result]:
        """The results of a guide, at one beta or at all of them."""
        here = [r for r in self.results if (r.guide, r.group, r.top_k) == (guide, group, top_k)]
        return [r for r in here if beta is None or r.beta == beta]


@dataclass(frozen=True)
class Timed:
    guide: str  # rad-v, rad-q or none
    k: int | None
    batch: int
    milliseconds: Estimate  # per token


@dataclass(frozen=True)
class Study:
    sweeps: dict[str, MeasuredSweep]  # detox, sentiment
    judges: dict[str, dict[str, Any]]
    ranks: dict[str, dict[str, Any]]
    times: list[Timed]
    expressivity: dict[str, float]  # mean squared error of "v" and "q"
    samples: list[dict[str, Any]]


def read_study(folder: Path) -> Study:
    if not folder.is_dir():
        raise OptionError(f"there is no folder {str(folder)!r}.", "give the folder of a study.")
    sweeps = {name: _read_sweep(folder / "sweeps", name) for name in ("detox", "sentiment")}
    timing = folder / "timing.json"
    return Study(
        sweeps={name: sweep for name, sweep in sweeps.items() if sweep.results},
        judges=_read_documents(folder / "judges"),
        ranks=_read_documents(folder / "rank"),
        times=[_read_timed(row) for row in _read_json(timing)["rows"]] if timing.is_file() else [],
        expressivity=_read_expressivity(folder / "expressivity"),
        samples=_read_optional_lines(folder / "samples.jsonl"),
    )


def _read_sweep(folder: Path, name: str) -> MeasuredSweep:
    """All runs of a sweep (NAME-k20, NAME-k40, …) as one."""
    runs = [run for run in sorted(folder.glob(f"{name}*")) if _is_measured(run)]
    results = [result for run in runs for result in read_runs([run])[0].results]
    rows = [row for run in runs for row in _read_optional_lines(run / "differences.jsonl")]
    at_perplexity = [row for row in rows if row.get("axis", "perplexity") == "perplexity"]
    return MeasuredSweep(results, list(map(_read_difference, at_perplexity)))


def _is_measured(run: Path) -> bool:
    """Whether at least one cell of the run has its metrics."""
    metrics = run / "metrics.jsonl"
    return metrics.is_file() and b"\n" in metrics.read_bytes()


def _read_difference(row: dict[str, Any]) -> Difference:
    names = ("first", "second", "metric", "group", "top_k")
    return Difference(*(row[name] for name in names), estimate=_read_estimate(row))


def _read_timed(row: dict[str, Any]) -> Timed:
    time = _read_estimate(row | {"value": row["milliseconds_per_token"]})
    return Timed(row["guide"], row.get("k"), row["batch"], time)


def _read_estimate(row: dict[str, Any]) -> Estimate:
    value, low, high = (NAN if row.get(name) is None else float(row[name]) for name in ("value", "low", "high"))
    return Estimate(value, low, high)


def _read_expressivity(folder: Path) -> dict[str, float]:
    """The error in the last line that recipes/expressivity.py prints, by kind of reward model."""
    errors = {}
    for file in folder.glob("[vq].txt"):
        found = re.findall(r"^RAD-[VQ], n = .*: MSE (\S+) over", file.read_text(encoding="utf-8"), re.MULTILINE)
        errors |= {file.stem: float(found[-1])} if found else {}
    return errors


def _read_documents(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.stem: _read_json(file) for file in sorted(folder.glob("*.json"))}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{str(file)!r} is damaged: {error}.", "make it anew.") from error


def _read_optional_lines(file: Path) -> list[dict[str, Any]]:
    return list(read_lines(file)) if file.is_file() else []
