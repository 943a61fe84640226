"""Two guides compared at equal perplexity or at equal KL, with an interval from resampled prompts.

    compare_at_equal("perplexity", texts_of_first_guide, texts_of_second_guide, "avg_max")
    compare_at_equal("kl", texts_of_first_guide, texts_of_second_guide, "avg_max")
    compare_curves("kl", points_of_first_guide, points_of_second_guide)  # the same from stored sums, without texts

Axes of arrays: c points of a guide's curve over β, e points of another guide's curve, r resamples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from radq.errors import OptionError
from radq.evaluation.estimates import DEFAULT_BOOTSTRAP, Bootstrap, Sums
from radq.evaluation.metrics import METRICS, ScoredTexts, check_metric, check_needs

Point = tuple[Sums, Sums]  # of a curve: the axis and the metric of the same texts


@dataclass(frozen=True)
class Axis:
    """A metric at whose equal values guides are compared. Curves are straight lines over `place` of its values."""

    noun: str  # in words for readers
    place: Callable[[Float[np.ndarray, "*s"]], Float[np.ndarray, "*s"]]
    value: Callable[[Float[np.ndarray, "*s"]], Float[np.ndarray, "*s"]]  # the inverse of `place`


AXES = {
    "perplexity": Axis("perplexity", np.log, np.exp),
    "kl": Axis("KL", np.asarray, np.asarray),
}


@dataclass(frozen=True)
class Difference:
    """The mean difference of a metric between two guides at the same value of an axis, first minus second."""

    value: float
    low: float
    high: float
    range: tuple[float, float]  # of the axis, reached by both guides
    without_overlap: int  # resamples without a common range, which are left out of the interval


def compare_at_equal(
    axis: str,
    first: Sequence[ScoredTexts],
    second: Sequence[ScoredTexts],
    metric: str,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> Difference:
    """Average the difference of two guides' curves of a metric over an axis, over their common range.

    The axis is "perplexity", whose logarithm is taken, or "kl". Each item of `first` and `second` holds the texts of a
    guide at one β. A curve joins the points of one guide, in their order on the axis, by straight lines. Both guides
    continued the same prompts, in the same order, and each resample takes the same prompts of both.
    """
    _check_axis(axis)
    for texts in (first, second):
        if len(texts) < 2:
            raise OptionError(f"a curve needs at least 2 values of β, got {len(texts)}.", "sweep more values of β.")
    ours, theirs = ([_point(one, axis, metric) for one in texts] for texts in (first, second))
    return compare_curves(axis, ours, theirs, bootstrap)


def compare_curves(
    axis: str, first: Sequence[Point], second: Sequence[Point], bootstrap: Bootstrap = DEFAULT_BOOTSTRAP
) -> Difference:
    """Compare two guides as `compare_at_equal` does, from the sums of their texts.

    A guide with a single point is compared at that point.
    """
    _check_axis(axis)
    curves = [_Curve(points, axis) for points in (first, second)]
    sizes = sorted({len(sums.totals) for curve in curves for sums in curve.sums})
    if len(sizes) > 1:
        raise OptionError(
            f"both guides must have the same prompts, got {sizes[0]} to {sizes[-1]} of them.",
            "compare guides on the same prompts.",
        )
    value, ends = mean_difference(*curves[0].points(), *curves[1].points())
    if ends[0] > ends[1] or (ends[0] == ends[1] and min(len(first), len(second)) > 1):
        spans = ["{:.4g} to {:.4g}".format(*AXES[axis].value(curve.points()[0][[0, -1]])) for curve in curves]
        raise OptionError(
            f"the guides have no common {AXES[axis].noun}: {spans[0]} for one and {spans[1]} for the other.",
            "sweep more values of β until the ranges overlap.",
        )
    drawn = [curve.resampled_points(bootstrap) for curve in curves]
    differences = np.array([mean_difference(x, y, u, v)[0] for x, y, u, v in zip(*drawn[0], *drawn[1], strict=True)])
    interval = bootstrap.interval(differences) if sizes[0] > 1 else (float("nan"), float("nan"))
    low, high = AXES[axis].value(np.array(ends)).tolist()
    return Difference(value, *interval, (low, high), int(np.isnan(differences).sum()))


def _check_axis(axis: str) -> None:
    if axis not in AXES:
        raise OptionError(f"guides cannot be compared at equal {axis!r}.", f"choose from {', '.join(AXES)}.")


def _point(texts: ScoredTexts, axis: str, metric: str) -> Point:
    """Compute the sums of a guide's texts at one β."""
    check_metric(metric)
    check_needs(axis, texts)
    across, attribute = METRICS[axis].sums, METRICS[metric].sums
    if attribute is None:
        raise OptionError(f"{metric} is no mean over prompts, so it has no curve.", "choose another metric.")
    assert across is not None
    return across(texts), attribute(texts)


class _Curve:
    """The points (place on the axis, metric) of a guide at several β, in their order on the axis."""

    def __init__(self, points: Sequence[Point], axis: str):
        self.place = AXES[axis].place
        self.sums = [sums for point in points for sums in point]

    def points(self) -> tuple[Float[np.ndarray, " c"], Float[np.ndarray, " c"]]:
        values = np.array([[sums.value for sums in self.sums]])
        x, y = self._ordered(values)
        return x[0], y[0]

    def resampled_points(self, bootstrap: Bootstrap) -> tuple[Float[np.ndarray, "r c"], Float[np.ndarray, "r c"]]:
        columns = np.stack([column for sums in self.sums for column in (sums.totals, sums.weights)], axis=1)
        drawn = bootstrap.sums(columns)  # (r, 2 · 2c)
        values = [sums.divide(drawn[:, 2 * n], drawn[:, 2 * n + 1]) for n, sums in enumerate(self.sums)]
        return self._ordered(np.stack(values, axis=1))

    def _ordered(self, values: Float[np.ndarray, "r m"]) -> tuple[Float[np.ndarray, "r c"], Float[np.ndarray, "r c"]]:
        x, y = self.place(values[:, 0::2]), values[:, 1::2]
        order = x.argsort(1, kind="stable")
        return np.take_along_axis(x, order, 1), np.take_along_axis(y, order, 1)


def mean_difference(
    x: Float[np.ndarray, " c"], y: Float[np.ndarray, " c"], u: Float[np.ndarray, " e"], v: Float[np.ndarray, " e"]
) -> tuple[float, tuple[float, float]]:
    """Average y(x) − v(u) over the range that both curves have; return the mean (NaN if there is none) and that range.

    Both are linear between their points, so the trapezoid rule over all points of both is exact. A curve of one point
    is compared there.
    """
    low, high = float(max(x[0], u[0])), float(min(x[-1], u[-1]))
    if low == high and 1 in (len(x), len(u)):
        return float(np.interp(low, x, y) - np.interp(low, u, v)), (low, high)
    if not low < high:
        return float("nan"), (low, high)
    inner = np.concatenate([x, u])
    knots = np.sort(np.concatenate([[low, high], inner[(inner > low) & (inner < high)]]))
    gaps = np.interp(knots, x, y) - np.interp(knots, u, v)
    return float(np.trapezoid(gaps, knots) / (high - low)), (low, high)
