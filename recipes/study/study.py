"""A study folder, read: what is not there yet is empty or None."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from radq.errors import DataError, OptionError
from radq.evaluation.metrics import Estimate
from radq.evaluation.sweep.config import Sweep, load_sweep
from radq.files import read_lines
from radq.report.results import NAN, Result, read_runs


@dataclass(frozen=True)
class Difference:
    """How much more of a metric the first guide has than the second at equal perplexity."""

    first: str
    second: str
    metric: str
    group: str
    top_k: int | None
    seed: int
    estimate: Estimate  # NaN where their perplexities never meet, and then there is a reason
    perplexity: tuple[float, float]
    reason: str | None

    @property
    def reversed(self) -> "Difference":
        e = self.estimate
        return replace(self, first=self.second, second=self.first, estimate=Estimate(-e.value, -e.high, -e.low))


@dataclass(frozen=True)
class MeasuredSweep:
    config: Sweep | None
    results: list[Result]
    differences: list[Difference]

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(result.group for result in self.results))

    @property
    def top_ks(self) -> list[int | None]:
        return sorted({result.top_k for result in self.results}, key=lambda k: k or 0)

    def of_guides(self, guides: Sequence[str]) -> "MeasuredSweep":
        """With the results of some guides, and of the unguided base, alone."""
        wanted = set(map(letters, guides))
        return replace(self, results=[r for r in self.results if r.unguided or letters(r.guide) in wanted])

    def beside(self, guide: str, others: Sequence[str]) -> "MeasuredSweep":
        """A guide and others, with the candidates that any of the others had; maybe nothing."""
        compared = set(map(letters, others))
        top_ks = {result.top_k for result in self.results if letters(result.guide) in compared}
        found = self.of_guides([guide, *others])
        return replace(found, results=[result for result in found.results if result.top_k in top_ks])

    def compare(self, first: str, second: str) -> list[Difference]:
        """All differences of a pair of guides, in whichever order the sweep has them."""
        pair = (letters(first), letters(second))
        straight = [one for one in self.differences if (letters(one.first), letters(one.second)) == pair]
        return straight or [
            one.reversed for one in self.differences if (letters(one.second), letters(one.first)) == pair
        ]

    def unguided(self, result: Result) -> Result | None:
        """What a result is to be compared with: the base model on the same prompts with the same candidates."""
        same = ("group", "top_k", "top_p", "seed")
        found = [r for r in self.results if r.unguided and all(getattr(r, n) == getattr(result, n) for n in same)]
        return found[0] if found else None

    def ratio(self, result: Result, metric: str) -> float:
        """Of a metric to that of the unguided base."""
        base = self.unguided(result)
        known = base is not None and metric in base.metrics and metric in result.metrics
        return result.metrics[metric].value / base.metrics[metric].value if base and known else NAN


@dataclass(frozen=True)
class Timed:
    guide: str  # rad-v, rad-q or none
    k: int | None
    batch: int
    milliseconds: Estimate  # per token


@dataclass(frozen=True)
class Timing:
    machine: str
    base: str
    rows: list[Timed]


@dataclass(frozen=True)
class Study:
    sweeps: dict[str, MeasuredSweep]  # detox, sentiment
    judges: dict[str, dict[str, Any]]
    models: dict[str, dict[str, Any]]
    ranks: dict[str, dict[str, Any]]  # what `radq rank model --json` prints
    timing: Timing | None
    expressivity: dict[str, float]  # mean squared error of "v" and "q"
    pieces: list[dict[str, Any]]
    notes: str  # markdown


def letters(name: str) -> str:
    """Names of guides are compared without their punctuation."""
    return " ".join(re.findall(r"[^\W_]+", name.lower()))


def read_study(folder: Path) -> Study:
    if not folder.is_dir():
        raise OptionError(f"there is no folder {str(folder)!r}.", "give the folder of a study.")
    mauve = _read_mauve(folder / "mauve.jsonl")
    sweeps = {name: _read_sweep(folder / "sweeps", name, mauve) for name in ("detox", "sentiment")}
    return Study(
        sweeps={name: sweep for name, sweep in sweeps.items() if sweep is not None},
        judges=_read_documents(folder / "judges"),
        models=_read_documents(folder / "models"),
        ranks=_read_documents(folder / "rank"),
        timing=_read_timing(folder / "timing.json"),
        expressivity=_read_expressivity(folder / "expressivity"),
        pieces=_read_optional_lines(folder / "pieces.jsonl"),
        notes=(folder / "notes.md").read_text(encoding="utf-8").strip() if (folder / "notes.md").is_file() else "",
    )


# --- sweeps ---


def _read_sweep(folder: Path, name: str, mauve: dict[tuple[str, str, str], Estimate]) -> MeasuredSweep | None:
    """All runs of a sweep as one: NAME, or NAME-k20, NAME-k40 and so on."""
    runs = [_read_run(run, mauve) for run in sorted(folder.glob(f"{name}*")) if _is_measured(run)]
    if not runs:
        return None
    return MeasuredSweep(
        _join_configs([run.config for run in runs if run.config is not None]),
        [result for run in runs for result in run.results],
        [difference for run in runs for difference in run.differences],
    )


def _is_measured(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.is_file() and b"\n" in metrics.read_bytes()


def _read_run(run: Path, mauve: dict[tuple[str, str, str], Estimate]) -> MeasuredSweep:
    config = run / "config.yaml"
    results = [_with_mauve(result, mauve.get((run.name, result.cell, result.group))) for result in _results(run)]
    differences = [_read_difference(row) for row in _read_optional_lines(run / "differences.jsonl")]
    return MeasuredSweep(load_sweep(config) if config.is_file() else None, results, differences)


def _join_configs(configs: list[Sweep]) -> Sweep | None:
    """They differ in the candidates only."""
    return replace(configs[0], top_k=[k for config in configs for k in config.top_k]) if configs else None


def _results(folder: Path) -> list[Result]:
    return read_runs([folder])[0].results


def _with_mauve(result: Result, mauve: Estimate | None) -> Result:
    return result if mauve is None else replace(result, metrics=result.metrics | {"mauve": mauve})


def _read_mauve(file: Path) -> dict[tuple[str, str, str], Estimate]:
    return {(row["sweep"], row["cell"], row["group"]): _estimate(row) for row in _read_optional_lines(file)}


def _read_difference(row: dict[str, Any]) -> Difference:
    low, high = row["perplexity"] or (NAN, NAN)
    known = {name: row[name] for name in ("first", "second", "metric", "group", "top_k", "seed")}
    return Difference(**known, estimate=_estimate(row), perplexity=(low, high), reason=row.get("reason"))


def _estimate(row: dict[str, Any]) -> Estimate:
    value, low, high = (NAN if row.get(name) is None else float(row[name]) for name in ("value", "low", "high"))
    return Estimate(value, low, high)


# --- the rest ---


def _read_expressivity(folder: Path) -> dict[str, float]:
    """Errors from what recipes/expressivity.py prints last: v.txt and q.txt."""
    errors = {}
    for kind in ("v", "q"):
        file = folder / f"{kind}.txt"
        found = re.findall(
            r"^RAD-[VQ], n = .*: MSE (\S+) over", file.read_text() if file.is_file() else "", re.MULTILINE
        )
        errors |= {kind: float(found[-1])} if found else {}
    return errors


def _read_timing(file: Path) -> Timing | None:
    document = _read_json(file) if file.is_file() else {}
    rows = [
        Timed(row["guide"], row.get("k"), row["batch"], _estimate(row | {"value": row["milliseconds_per_token"]}))
        for row in document.get("rows", [])
    ]
    return Timing(document.get("machine", "not named"), document.get("base", "not named"), rows) if rows else None


def _read_documents(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.stem: _read_json(file) for file in sorted(folder.glob("*.json"))}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{str(file)!r} is damaged: {error}.", "make it anew.") from error


def _read_optional_lines(file: Path) -> list[dict[str, Any]]:
    return list(read_lines(file)) if file.is_file() else []
