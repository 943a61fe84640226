"""Curves of results over β, for each guide and choice of candidates (top-k, top-p) and KL budget.

    for curve in find_curves(run.results):  # of one class of prompts
        [step.estimate("avg_max") for step in curve.steps]

Cells that differ in their KL budget alone make one curve over the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from radq.evaluation.estimates import Estimate
from radq.report.results import NAN, Result
from radq.settings import exact

BUDGET = "KL budget"  # the setting of a curve that runs over it


@dataclass(frozen=True)
class Step:
    """One point of a curve: cells that differ in their seed alone."""

    label: str
    results: list[Result]

    def estimate(self, metric: str) -> Estimate:
        """Average a metric over seeds, and the ends of its intervals likewise.

        All seeds continue the same prompts, so that this interval is too wide rather than too narrow.
        """
        return _average([result.metrics[metric] for result in self.results if metric in result.metrics])

    def change(self, metric: str) -> Estimate:
        """Average the change of a metric from the unguided base model over seeds."""
        return _average([result.changes[metric] for result in self.results if metric in result.changes])

    @property
    def title(self) -> str:
        """The label with the name of its number: "β = 20", "n=5", "ask=1" or "KL 0.1"; empty for the unguided base."""
        return self.label if not self.label or self.label.startswith(("KL", "n=", "ask=")) else f"β = {self.label}"


def _average(estimates: Sequence[Estimate]) -> Estimate:
    known = [estimate for estimate in estimates if isfinite(estimate.value)]
    if not known:
        return Estimate(NAN, NAN, NAN)
    value, low, high = (fmean(getattr(one, end) for one in known) for end in ("value", "low", "high"))
    return Estimate(value, low, high)


@dataclass(frozen=True)
class Curve:
    """The cells of one guide with the same candidates, in the order of |β| or of the KL budget."""

    guide: str
    setting: str
    unguided: bool
    steps: list[Step]

    @property
    def label(self) -> str:
        name = f"{self.guide} (unguided)" if self.unguided else self.guide
        return f"{name}, {self.setting}" if self.setting else name


def find_curves(results: Sequence[Result]) -> list[Curve]:
    """Group the results of one class of prompts into curves, in the order of the results."""
    found: dict[tuple[str, str], list[Result]] = {}
    over_budget = _find_over_budget(results)
    for result in results:
        setting = _curve_setting(result, _guide_and_candidates(result) in over_budget)
        found.setdefault((result.guide, setting), []).append(result)
    return [
        Curve(guide, setting, cells[0].unguided, _steps(cells, setting.endswith(BUDGET)))
        for (guide, setting), cells in found.items()
    ]


def find_unguided(results: Sequence[Result], curve: Curve) -> Step | None:
    """Find the unguided cells with the run and the candidates of a curve."""
    one = curve.steps[0].results[0]
    wanted = (one.run, one.top_k, one.top_p)
    found = [result for result in results if result.unguided and (result.run, result.top_k, result.top_p) == wanted]
    return Step("", found) if found else None


def _guide_and_candidates(result: Result) -> tuple[str, int | None, float | None]:
    """Return the guide and the candidates, which all cells of a curve over the KL budget share."""
    return result.guide, result.top_k, result.top_p


def _find_over_budget(results: Sequence[Result]) -> set[tuple[str, int | None, float | None]]:
    """Find the guides and candidates whose cells with a KL budget have a single β: their curve runs over the budget."""
    betas: dict[tuple[str, int | None, float | None], set[float | None]] = {}
    for result in results:
        if result.kl_budget is not None:
            betas.setdefault(_guide_and_candidates(result), set()).add(result.beta)
    return {shared for shared, found in betas.items() if len(found) == 1}


def _curve_setting(result: Result, over_budget: bool) -> str:
    parts = [
        None if result.top_k is None else f"k={result.top_k}",
        None if result.top_p is None else f"p={exact(result.top_p)}",
        None if result.kl_budget is None else BUDGET if over_budget else f"KL≤{exact(result.kl_budget)}",
    ]
    return ", ".join(part for part in parts if part is not None)


def _steps(results: Sequence[Result], over_budget: bool) -> list[Step]:
    def position(result: Result) -> tuple[float, float]:
        number = (result.kl_budget if over_budget else result.beta or result.best_of or result.ask) or 0.0
        return abs(number), number

    def label(result: Result) -> str:
        if over_budget:
            return f"KL {exact(result.kl_budget or 0.0)}"
        if result.best_of is not None:
            return f"n={result.best_of}"
        if result.ask is not None:
            return f"ask={result.ask}"
        return "" if result.beta is None else exact(result.beta)

    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=position):
        found.setdefault(label(result), []).append(result)
    return [Step(name, cells) for name, cells in found.items()]
