"""Agreement of rewards with labels, against brute force, scipy and numbers worked by hand."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from radq.judges.agreement import area_under_curve, measure_agreement, rank_correlation

FEW = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, -0.5])  # so that there are ties
PAIRS = st.lists(st.tuples(FEW, FEW), min_size=2, max_size=30).map(np.array)


@given(PAIRS)
def test_auc_counts_pairs(pairs: np.ndarray) -> None:
    scores, high = pairs[:, 0], pairs[:, 1] > 0.3
    assume(high.any() and not high.all())
    wins = [(a > b) + (a == b) / 2 for a in scores[high] for b in scores[~high]]
    assert area_under_curve(scores, high) == pytest.approx(np.mean(wins))


@given(PAIRS)
def test_spearman_is_that_of_scipy(pairs: np.ndarray) -> None:
    found = rank_correlation(pairs[:, 0], pairs[:, 1])
    if np.ptp(pairs, axis=0).min() == 0:
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(pairs[:, 0], pairs[:, 1]).statistic)


@given(PAIRS)
def test_bins_hold_every_text_once_and_perfect_rewards_have_no_error(pairs: np.ndarray) -> None:
    rewards, labels = pairs[:, 0], pairs[:, 1]
    found = measure_agreement(rewards, labels)
    assert sum(one.texts for one in found.bins) == len(pairs)
    assert sum(one.texts * (one.mean_reward or 0) for one in found.bins) == pytest.approx(rewards.sum())
    assert found.calibration_error >= abs(rewards.mean() - labels.mean()) - 1e-9
    perfect = measure_agreement(labels, labels)
    assert (perfect.mse, perfect.calibration_error, perfect.accuracy) == (0, 0, 1)
    assert perfect.constant_mse == pytest.approx(labels.var())


def test_an_example_by_hand() -> None:
    found = measure_agreement(np.array([0.12, 0.18, 0.55, 1.2]), np.array([0.0, 1.0, 0.0, 1.0]))
    assert found.threshold == 0.5
    assert found.auc == 0.75  # of the pairs with another label, 0.18 and 0.55 are in the wrong order
    assert found.accuracy == 0.5
    assert found.mse == pytest.approx((0.12**2 + 0.82**2 + 0.55**2 + 0.2**2) / 4)
    assert found.constant_mse == 0.25
    assert found.bins[1] == (0.1, 0.2, 2, pytest.approx(0.15), 0.5)
    assert found.bins[5].texts == found.bins[9].texts == 1
    assert found.bins[0] == (0.0, 0.1, 0, None, None)
    assert found.calibration_error == pytest.approx((2 * 0.35 + 0.55 + 0.2) / 4)


def test_classes_of_other_labels() -> None:
    assert measure_agreement(np.array([1.0, 2.0]), np.array([2.0, 4.0]), (1.0, 5.0)).threshold == 3
    stars = measure_agreement(np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 5.0]), (1.0, 5.0))
    assert (stars.threshold, stars.auc, stars.accuracy) == (3.0, 1.0, 1.0)
    alone = measure_agreement(np.array([0.2, 0.7]), np.array([1.0, 1.0]))
    assert (alone.auc, alone.spearman) == (None, None)
    assert measure_agreement(np.array([5.0]), np.array([5.0]), (5.0, 5.0)).calibration_error == 0
