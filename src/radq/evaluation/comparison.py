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
    for name in (axis, metric):
        check_metric(name)
    if METRICS[metric].compute is None:
        raise OptionError(f"{metric} is no mean over prompts, so it has no curve.", "choose another metric.")
    for texts in (first, second):
        if len(texts) < 2:
            raise OptionError(f"a curve needs at least 2 values of β, got {len(texts)}.", "sweep more values of β.")
        for cell in texts:
            check_needs(axis, cell)
    ours, theirs = ([(METRICS[axis].sums(t), METRICS[metric].sums(t)) for t in texts] for texts in (first, second))
    return compare_curves(axis, ours, theirs, bootstrap)


def compare_curves(
    axis: str, first: Sequence[Point], second: Sequence[Point], bootstrap: Bootstrap = DEFAULT_BOOTSTRAP
) -> Difference:
    """Compare two guides as `compare_at_equal` does, from the sums of their texts.

    A guide with a single point is compared at that point.
    """
    if axis not in AXES:
        raise OptionError(f"guides cannot be compared at equal {axis!r}.", f"choose from {', '.join(AXES)}.")
    sizes = sorted({len(sums.totals) for point in (*first, *second) for sums in point})
    if len(sizes) > 1:
        raise OptionError(
            f"both guides must have the same prompts, got {sizes[0]} to {sizes[-1]} of them.",
            "compare guides on the same prompts.",
        )
    values = (np.array([[sums.value for sums in point] for point in guide]).T for guide in (first, second))
    curves = [_order(axis, points) for points in values]
    value, ends = mean_difference(*curves[0], *curves[1])
    if ends[0] > ends[1] or (ends[0] == ends[1] and min(len(first), len(second)) > 1):
        spans = ["{:.4g} to {:.4g}".format(*AXES[axis].value(x[[0, -1]])) for x, _ in curves]
        raise OptionError(
            f"the guides have no common {AXES[axis].noun}: {spans[0]} for one and {spans[1]} for the other.",
            "sweep more values of β until the ranges overlap.",
        )
    drawn = [bootstrap.resample(*(sums for point in guide for sums in point)) for guide in (first, second)]
    ours, theirs = ([_order(axis, values.reshape(-1, 2).T) for values in guide.T] for guide in drawn)
    differences = np.array([mean_difference(*a, *b)[0] for a, b in zip(ours, theirs, strict=True)])
    interval = bootstrap.interval(differences) if sizes[0] > 1 else (float("nan"), float("nan"))
    low, high = AXES[axis].value(np.array(ends)).tolist()
    return Difference(value, *interval, (low, high), int(np.isnan(differences).sum()))


def _order(axis: str, values: Float[np.ndarray, "2 c"]) -> Float[np.ndarray, "2 c"]:
    """Put the points (axis, metric) of a curve into their order on the axis, at their places there."""
    x, y = AXES[axis].place(values[0]), values[1]
    order = x.argsort(kind="stable")
    return np.stack([x[order], y[order]])


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
