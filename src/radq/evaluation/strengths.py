"""Strengths from 0 to 1, found from texts at several levels of a guide: values of β, or KL budgets.

Strength 1 is the level beyond which the judge no longer improves by more than its interval, or beyond which the
perplexity leaves its bound. Strength s is the level with the share s of the improvement that strength 1 reaches, so
that equal steps of strength are equal steps of the judge's metric.

Axes of arrays: l levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float
from scipy.optimize import isotonic_regression

from radq.errors import DataError
from radq.evaluation.estimates import (
    DEFAULT_BOOTSTRAP,
    Bootstrap,
    Estimate,
    Sums,
    estimate,
    estimate_change,
    estimate_ratio,
)

STRENGTHS = np.linspace(0, 1, 11)
Limit = Literal["judge", "perplexity", "range"]


@dataclass(frozen=True)
class Level:
    """A level of a guide, and the sums of the metrics of its texts. Level 0 is the unguided base model.

    `ends` are metrics of when texts end, by name; they decide nothing.
    """

    place: float
    score: Sums
    perplexity: Sums
    ends: dict[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredLevel:
    """A level with its metrics. The gain is the judge's improvement over the unguided base model."""

    place: float
    score: Estimate
    gain: Estimate
    ratio: Estimate
    ends: dict[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class Strengths:
    """The places, scores and perplexity ratios of `STRENGTHS`, the levels behind them, and the reason of the end."""

    places: Float[np.ndarray, " s"]
    scores: Float[np.ndarray, " s"]
    ratios: Float[np.ndarray, " s"]
    measured: list[MeasuredLevel]
    limited_by: Limit


def find_strengths(
    levels: Sequence[Level], max_ratio: float, reduce: bool = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP
) -> Strengths:
    """Find strengths from levels in ascending order, of which the first is the unguided base model.

    Args:
        max_ratio: the largest perplexity, as a multiple of the unguided one; the upper end of its interval counts.
        reduce: whether the judge improves where its metric falls.
    """
    sign = -1.0 if reduce else 1.0
    measured = [
        MeasuredLevel(
            level.place,
            estimate(level.score, bootstrap),
            _gain(level, levels[0], sign, bootstrap),
            estimate_ratio(level.perplexity, levels[0].perplexity, bootstrap),
            level.ends,
        )
        for level in levels
    ]
    inside = _count_inside(measured, max_ratio)
    last = _find_last(levels[:inside], sign, bootstrap)
    curve = measured[: last + 1]
    limit: Limit = "judge" if last < inside - 1 else "range"
    if limit == "range" and inside < len(levels):
        limit = "judge"
        if _gain(levels[inside], levels[last], sign, bootstrap).low > 0:  # it would improve beyond the bound
            limit = "perplexity"
            curve = [*curve, _cut(measured[last], measured[inside], max_ratio)]
    if not any(one.gain.low > 0 for one in measured[: inside + (limit == "perplexity")]):
        raise DataError(_describe_flat(measured, inside, max_ratio), "use another judge, more prompts or other levels.")
    return Strengths(*_spread(curve, measured[0].score.value, sign), measured, limit)


def _gain(level: Level, other: Level, sign: float, bootstrap: Bootstrap) -> Estimate:
    change = estimate_change(level.score, other.score, bootstrap)
    low, high = sorted((sign * change.low, sign * change.high))
    return Estimate(sign * change.value, low, high, change.skipped, change.infinite)


def _count_inside(measured: Sequence[MeasuredLevel], max_ratio: float) -> int:
    """Count the first levels whose perplexity ratio is inside the bound, with its interval."""
    outside = (n for n, one in enumerate(measured) if n > 0 and not one.ratio.high <= max_ratio)
    return next(outside, len(measured))


def _find_last(levels: Sequence[Level], sign: float, bootstrap: Bootstrap) -> int:
    """Find the first level that improves, and that no later one improves on, by more than the interval.

    It is level 0 where no level improves.
    """

    def improves(later: int, n: int) -> bool:
        return _gain(levels[later], levels[n], sign, bootstrap).low > 0

    better = [n for n in range(1, len(levels)) if improves(n, 0)]
    best = (n for n in better if not any(improves(later, n) for later in range(n + 1, len(levels))))
    return next(best, better[-1] if better else 0)


def _cut(inner: MeasuredLevel, outer: MeasuredLevel, max_ratio: float) -> MeasuredLevel:
    """The place between two levels at which the upper end of the perplexity ratio reaches its bound."""
    inner_high = inner.ratio.high if inner.place > 0 else 1.0
    share = (max_ratio - inner_high) / (outer.ratio.high - inner_high)

    def between(first: float, second: float) -> float:
        return first + share * (second - first)

    def mix(first: Estimate, second: Estimate) -> Estimate:
        return Estimate(
            between(first.value, second.value), between(first.low, second.low), between(first.high, second.high)
        )

    return MeasuredLevel(
        between(inner.place, outer.place),
        mix(inner.score, outer.score),
        mix(inner.gain, outer.gain),
        mix(inner.ratio, outer.ratio),
    )


def _spread(
    curve: Sequence[MeasuredLevel], unguided: float, sign: float
) -> tuple[Float[np.ndarray, " s"], Float[np.ndarray, " s"], Float[np.ndarray, " s"]]:
    """Find the places, scores and perplexity ratios at which equal shares of the improvement are reached."""
    places = np.array([one.place for one in curve])
    gains = isotonic_regression([one.gain.value for one in curve]).x  # neighbours that fall get their mean
    gains = gains - gains[0]
    first = np.concatenate([[True], np.diff(gains) > 0])  # the smallest of the levels with equal gains
    wanted = STRENGTHS * gains[-1]
    found = np.interp(wanted, gains[first], places[first])
    ratios = np.interp(found, places, [one.ratio.value for one in curve])
    return found, unguided + sign * wanted, ratios


def _describe_flat(measured: Sequence[MeasuredLevel], inside: int, max_ratio: float) -> str:
    if inside == 1 and len(measured) > 1:
        first = measured[1]
        return (
            f"the perplexity ratio at the smallest level, {first.place:g}, is {first.ratio.value:.2f} and may be "
            f"{first.ratio.high:.2f}, more than {max_ratio:g}, and the judge sees no improvement before."
        )
    best = max(measured[1:inside] or measured[1:], key=lambda one: one.gain.value)
    gain = best.gain
    return (
        f"no strength improves: the judge's largest gain is {gain.value:.3g} ({gain.low:.3g} to {gain.high:.3g}), "
        f"at the level {best.place:g}."
    )
