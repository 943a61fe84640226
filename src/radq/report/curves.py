"""Curves: the cells of one guide in the order of its strength, seeds averaged.

    for curve in find_curves(results):  # of one class of prompts
        [step.estimate("avg_max") for step in curve.steps]

A curve runs over β, for each guide and choice of candidates (top-k, top-p) and KL budget. Cells that differ in their
KL budget alone make one curve over the budget.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from radq.evaluation.metrics import Estimate
from radq.report.results import NAN, Result

ATTRIBUTES = ("avg_max", "toxic_rate", "positive_rate", "mean_score")
FLUENCIES = ("perplexity", "mauve")
BUDGET = "KL budget"  # the setting of a curve that runs over it


@dataclass(frozen=True)
class Step:
    """One strength of a guide: cells that differ in their seed."""

    label: str
    results: list[Result]

    def estimate(self, metric: str) -> Estimate:
        """The mean over seeds, and the means of the ends of their intervals: all seeds continue the same prompts, so
        that is rather too wide than too narrow.
        """
        found = [result.metrics[metric] for result in self.results if metric in result.metrics]
        known = [estimate for estimate in found if isfinite(estimate.value)]
        if not known:
            return Estimate(NAN, NAN, NAN)
        value, low, high = (fmean(getattr(one, end) for one in known) for end in ("value", "low", "high"))
        return Estimate(value, low, high)


@dataclass(frozen=True)
class Curve:
    guide: str
    setting: str
    unguided: bool
    steps: list[Step]

    @property
    def label(self) -> str:
        name = f"{self.guide} (unguided)" if self.unguided else self.guide
        return f"{name}, {self.setting}" if self.setting else name


def find_curves(results: Sequence[Result]) -> list[Curve]:
    """The curves of one class of prompts, in the order of the results."""
    found: dict[tuple[str, str], list[Result]] = {}
    over_budget = _find_over_budget(results)
    for result in results:
        found.setdefault((result.guide, _setting(result, _chooser(result) in over_budget)), []).append(result)
    return [
        Curve(guide, setting, cells[0].unguided, _steps(cells, setting.endswith(BUDGET)))
        for (guide, setting), cells in found.items()
    ]


def unique(values: Iterable[str]) -> list[str]:
    """Each once, in the order in which they come."""
    return list(dict.fromkeys(values))


def _chooser(result: Result) -> tuple[str, int | None, float | None]:
    """What the cells of a curve over the KL budget have in common."""
    return result.guide, result.top_k, result.top_p


def _find_over_budget(results: Sequence[Result]) -> set[tuple[str, int | None, float | None]]:
    """Whose cells with a KL budget have a single β."""
    betas: dict[tuple[str, int | None, float | None], set[float | None]] = {}
    for result in results:
        if result.kl_budget is not None:
            betas.setdefault(_chooser(result), set()).add(result.beta)
    return {chooser for chooser, found in betas.items() if len(found) == 1}


def _setting(result: Result, over_budget: bool) -> str:
    parts = [
        None if result.top_k is None else f"k={result.top_k}",
        None if result.top_p is None else f"p={result.top_p:g}",
        None if result.kl_budget is None else BUDGET if over_budget else f"KL≤{result.kl_budget:g}",
    ]
    return ", ".join(part for part in parts if part is not None)


def _steps(results: Sequence[Result], over_budget: bool) -> list[Step]:
    def strength(result: Result) -> tuple[float, float]:
        number = (result.kl_budget if over_budget else result.beta) or 0.0
        return abs(number), number

    def label(result: Result) -> str:
        if over_budget:
            return f"KL {result.kl_budget:g}"
        return "" if result.beta is None else f"{result.beta:g}"

    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=strength):
        found.setdefault(label(result), []).append(result)
    return [Step(name, cells) for name, cells in found.items()]
