"""Agreement of rewards with labels: AUC, rank correlation, squared error and calibration, exact also for ties.

agreement = measure_agreement(rewards, labels)
agreement.auc, agreement.spearman, agreement.calibration_error
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import rankdata

NUM_BINS = 10
ONE_OF_TWENTY = 1.645  # standard deviations that a normal variable exceeds in one of twenty cases


class Bin(NamedTuple):
    """Texts with rewards from `low` to `high`; the first and the last bin also hold those below and above."""

    low: float
    high: float
    texts: int
    mean_reward: float | None  # None without texts
    mean_label: float | None


@dataclass(frozen=True)
class Agreement:
    """How well rewards agree with labels."""

    threshold: float  # labels above it are the high class, for AUC and accuracy
    auc: float | None  # see `area_under_curve`; None if one class has no texts
    accuracy: float  # share of texts whose reward and label lie on the same side of the threshold
    spearman: float | None  # correlation of the ranks; None if all rewards or all labels are equal
    mse: float  # mean squared difference of reward and label
    constant_mse: float  # the same for a predictor that always answers the mean label
    calibration_error: float  # mean over texts of the distance between mean reward and mean label of their bin
    bins: list[Bin]  # of equal width over the range of the labels


def measure_agreement(
    rewards: Float[np.ndarray, " n"], labels: Float[np.ndarray, " n"], limits: tuple[float, float] = (0.0, 1.0)
) -> Agreement:
    """Compare rewards with labels, whose range is `limits`. The classes of AUC and accuracy are the two labels, where
    there are two, or else those above and below the middle of the range."""
    rewards, labels = rewards.astype(np.float64), labels.astype(np.float64)
    different = np.unique(labels)
    threshold = float(different.mean() if len(different) == 2 else np.mean(limits))
    high = labels > threshold
    bins = fill_bins(rewards, labels, limits)
    distances = [b.texts * abs(b.mean_reward - b.mean_label) for b in bins if b.texts]  # pyright: ignore
    return Agreement(
        threshold=threshold,
        auc=area_under_curve(rewards, high) if 0 < high.sum() < len(high) else None,
        accuracy=float(((rewards > threshold) == high).mean()),
        spearman=rank_correlation(rewards, labels),
        mse=float(np.square(rewards - labels).mean()),
        constant_mse=float(labels.var()),
        calibration_error=sum(distances) / len(labels),
        bins=bins,
    )


def area_under_curve(scores: Float[np.ndarray, " n"], high: Bool[np.ndarray, " n"]) -> float:
    """Probability that a score of the high class is larger than one of the low class; both must have some.

    Equal scores count half. This is the Mann-Whitney statistic, computed from ranks.
    """
    num_high, num_low = int(high.sum()), int((~high).sum())
    return float((rankdata(scores)[high].sum() - num_high * (num_high + 1) / 2) / (num_high * num_low))


def chance_auc(num_high: int, num_low: int) -> float:
    """The AUC that random scores exceed in one of twenty cases, from the normal limit of its distribution."""
    return 0.5 + ONE_OF_TWENTY * float(np.sqrt((num_high + num_low + 1) / (12 * num_high * num_low)))


def chance_accuracy(num_pairs: int) -> float:
    """The share of pairs that random scores order rightly in one of twenty cases, from the normal limit."""
    return 0.5 + ONE_OF_TWENTY * 0.5 / float(np.sqrt(num_pairs))


def chance_correlation(num_texts: int) -> float:
    """The rank correlation that random scores exceed in one of twenty cases, from the normal limit."""
    return ONE_OF_TWENTY / float(np.sqrt(num_texts - 1))


def rank_correlation(first: Float[np.ndarray, " n"], second: Float[np.ndarray, " n"]) -> float | None:
    """Spearman's correlation: Pearson's, of ranks that are averaged over ties; None if one of both is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1])


def fill_bins(
    rewards: Float[np.ndarray, " n"], labels: Float[np.ndarray, " n"], limits: tuple[float, float]
) -> list[Bin]:
    """Mean reward and mean label of the texts in each bin."""
    edges = np.linspace(*limits, NUM_BINS + 1)
    bin_of = np.clip(np.searchsorted(edges, rewards, side="right") - 1, 0, NUM_BINS - 1)
    bins = []
    for n in range(NUM_BINS):
        inside = bin_of == n
        means = [float(values[inside].mean()) if inside.any() else None for values in (rewards, labels)]
        bins.append(Bin(float(edges[n]), float(edges[n + 1]), int(inside.sum()), *means))
    return bins
