"""Values with confidence intervals, from resamples of the prompts.

    estimate(Sums(totals, weights), Bootstrap(resamples=1000))

A metric is a ratio of two sums over prompts, so that resampling the prompts is a matrix product. Axes: p prompts, m
columns, r resamples.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float, Int

from radq.settings import Range, check_values

MAX_RESAMPLES = 1_000_000  # more change no digit that is shown
RESAMPLES_AT_ONCE = 100
TRUSTED_PROMPTS = 30  # from fewer, intervals are too narrow: of 95% intervals from 5 prompts, 82% hold the true value


@dataclass(frozen=True)
class Sums:
    """The two sums that a metric is the ratio of: Σ totals / Σ weights over the prompts, or exp of that."""

    totals: Float[np.ndarray, " p"]
    weights: Float[np.ndarray, " p"]
    skipped: int = 0  # samples that are left out because they are blank
    infinite: int = 0  # samples that are left out because their value is infinite
    exponential: bool = False

    def divide(self, totals: Float[np.ndarray, "*r"], weights: Float[np.ndarray, "*r"]) -> Float[np.ndarray, "*r"]:
        """Compute the metric from sums over some of the prompts; NaN where the weights sum to 0."""
        ratio = np.divide(totals, weights, out=np.full(np.shape(totals), np.nan), where=np.asarray(weights) > 0)
        with np.errstate(over="ignore"):
            return np.exp(ratio) if self.exponential else ratio

    @property
    def value(self) -> float:
        return float(self.divide(self.totals.sum(keepdims=True), self.weights.sum(keepdims=True))[0])


@dataclass(frozen=True)
class Bootstrap:
    """Makes confidence intervals: percentiles of a metric over resamples of the prompts."""

    resamples: Annotated[int, Range(1, MAX_RESAMPLES)] = 1000
    seed: int = 0
    confidence: Annotated[float, Range(0, 1, without_low=True, without_high=True)] = 0.95

    def __post_init__(self) -> None:
        check_values(self)

    def choices(self, p: int) -> Iterator[Int[np.ndarray, "r p"]]:
        """Yield how often each prompt occurs in each resample, some resamples at a time."""
        rng = np.random.default_rng(self.seed)
        for first in range(0, self.resamples, RESAMPLES_AT_ONCE):
            r = min(RESAMPLES_AT_ONCE, self.resamples - first)
            drawn = rng.integers(p, size=(r, p)) + p * np.arange(r)[:, None]
            yield np.bincount(drawn.ravel(), minlength=r * p).reshape(r, p)

    def sums(self, columns: Float[np.ndarray, "p m"]) -> Float[np.ndarray, "r m"]:
        """Sum columns over resampled prompts. Every metric of the same prompts gets the same resamples."""
        return np.concatenate([counts @ columns for counts in self.choices(len(columns))])

    def resample(self, *several: Sums) -> Float[np.ndarray, "m r"]:
        """Compute metrics over resampled prompts; each resample takes the same prompts of all."""
        columns = np.stack([column for sums in several for column in (sums.totals, sums.weights)], axis=1)
        drawn = self.sums(columns).T  # (2m, r)
        return np.stack([sums.divide(*drawn[2 * n : 2 * n + 2]) for n, sums in enumerate(several)])

    def interval(self, values: Float[np.ndarray, " r"]) -> tuple[float, float]:
        """The percentiles of the resampled values; NaN where all of these are NaN."""
        if np.isnan(values).all():
            return float("nan"), float("nan")
        tail = (1 - self.confidence) / 2
        low, high = np.nanquantile(values, [tail, 1 - tail])
        return float(low), float(high)


DEFAULT_BOOTSTRAP = Bootstrap()


@dataclass(frozen=True)
class Estimate:
    """The value of a metric, its interval, and the numbers of samples left out. NaN stands for an unknown number."""

    value: float
    low: float
    high: float
    skipped: int = 0
    infinite: int = 0

    def doubt(self, prompts: int | None) -> str:
        """Say why this value, as a difference, decides nothing; empty if its interval excludes 0 and can be trusted."""
        if np.isnan(self.low) and np.isnan(self.high):
            return "there is no interval"
        if not is_trusted(prompts):
            return f"{prompts} prompts are too few to tell"
        return "" if self.low > 0 or self.high < 0 else "the 95% interval includes 0"


def is_trusted(prompts: int | None) -> bool:
    """Tell whether so many prompts make an interval that can be trusted; an unknown number is not doubted."""
    return prompts is None or prompts >= TRUSTED_PROMPTS


def estimate(sums: Sums, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> Estimate:
    """Compute a metric with its bootstrap interval over prompts; the interval of a single prompt is NaN."""
    return _estimate(bootstrap, lambda value: value, sums)


def estimate_change(guided: Sums, unguided: Sums, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> Estimate:
    """Compute a metric of guided texts minus that of unguided ones."""
    return _estimate(bootstrap, np.subtract, guided, unguided)


def estimate_ratio(guided: Sums, unguided: Sums, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> Estimate:
    """Compute a metric of guided texts as a multiple of that of unguided ones."""
    return _estimate(bootstrap, np.divide, guided, unguided)


def _estimate(bootstrap: Bootstrap, combine: Callable[..., Any], *several: Sums) -> Estimate:
    low = high = float("nan")
    if len(several[0].totals) > 1:
        low, high = bootstrap.interval(combine(*bootstrap.resample(*several)))
    skipped, infinite = (sum(getattr(sums, name) for sums in several) for name in ("skipped", "infinite"))
    return Estimate(float(combine(*(sums.value for sums in several))), low, high, skipped, infinite)
