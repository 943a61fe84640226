"""Strengths from levels of a guide, against curves whose strengths are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radq.errors import DataError
from radq.evaluation.calibration import STRENGTHS, FoundStrengths, Level, find_strengths
from radq.evaluation.estimates import Bootstrap, Sums

PROMPTS, TOKENS = 80, 20
BOOTSTRAP = Bootstrap(100)


def make_levels(places: list[float], scores: list[float], ratios: list[float], noise: float = 0.0) -> list[Level]:
    """Levels with given mean scores and perplexity ratios; the scores of their prompts differ by noise."""
    rng = np.random.default_rng(0)
    prompts = rng.normal(0, 0.1, PROMPTS)
    return [
        Level(
            place,
            Sums(score + prompts + noise * rng.normal(0, 1, PROMPTS), np.ones(PROMPTS)),
            Sums(TOKENS * (2 + np.log(ratio) + prompts), np.full(PROMPTS, float(TOKENS)), exponential=True),
        )
        for place, score, ratio in zip(places, scores, ratios, strict=True)
    ]


def find(
    scores: list[float], ratios: list[float] | None = None, reduce: bool = False, max_ratio: float = 1.3
) -> FoundStrengths:
    levels = make_levels([10.0 * n for n in range(len(scores))], scores, ratios or [1.0] * len(scores))
    return find_strengths(levels, max_ratio, reduce, BOOTSTRAP)


def test_equal_strengths_are_equal_shares_of_the_improvement() -> None:
    found = find([0.2, 0.5, 0.7, 0.8, 0.8])
    assert found.limited_by == "judge"
    assert found.places[-1] == pytest.approx(30)
    np.testing.assert_allclose(found.scores, 0.2 + 0.6 * STRENGTHS, atol=0.02)
    np.testing.assert_allclose(found.places[5], 10, atol=1e-9)  # half of the improvement is at the level 10
    np.testing.assert_allclose(np.interp(found.places, [0, 10, 20, 30], [0.2, 0.5, 0.7, 0.8]), 0.2 + 0.6 * STRENGTHS)


def test_an_attribute_that_is_reduced() -> None:
    found = find([0.8, 0.5, 0.3, 0.3], reduce=True)
    assert found.places[-1] == pytest.approx(20)
    assert found.scores[-1] == pytest.approx(found.scores[0] - 0.5)
    with pytest.raises(DataError, match="no strength improves"):
        find([0.8, 0.5, 0.3, 0.3])


def test_strength_1_ends_where_the_perplexity_leaves_its_bound() -> None:
    found = find([0.2, 0.4, 0.6, 0.8], [1.0, 1.1, 1.2, 1.6])
    assert found.limited_by == "perplexity"
    assert found.places[-1] == pytest.approx(22.5)  # 1.3 is a quarter of the way from 1.2 to 1.6
    assert found.ratios[-1] == pytest.approx(1.3)
    assert found.scores[-1] - found.scores[0] == pytest.approx(0.45)


def test_the_upper_end_of_the_perplexity_counts() -> None:
    levels = make_levels([0, 10, 20], [0.2, 0.4, 0.6], [1.0, 1.1, 1.29])
    rng = np.random.default_rng(1)
    worse = levels[2].perplexity
    noisy = Sums(worse.totals + TOKENS * 0.3 * rng.normal(0, 1, PROMPTS), worse.weights, exponential=True)
    found = find_strengths([*levels[:2], Level(20, levels[2].score, noisy)], 1.3, bootstrap=BOOTSTRAP)
    assert found.measured[2].ratio.high > 1.3
    assert found.places[-1] < 20


def test_a_bound_that_the_first_level_leaves() -> None:
    found = find([0.2, 0.6], [1.0, 1.6])
    assert found.places[-1] == pytest.approx(5)
    with pytest.raises(DataError, match="perplexity ratio at the smallest level"):
        find([0.2, 0.2], [1.0, 1.6])


def test_levels_that_end_too_early_are_named() -> None:
    assert find([0.2, 0.4, 0.6]).limited_by == "range"


def test_noise_beyond_the_best_level_is_no_improvement() -> None:
    scores = [0.2, 0.6, 0.601, 0.602]
    levels = make_levels([0, 10, 20, 30], scores, [1.0] * 4, noise=0.2)
    found = find_strengths(levels, 1.3, bootstrap=BOOTSTRAP)
    assert found.places[-1] == pytest.approx(10)
    with pytest.raises(DataError, match="no strength improves"):
        find_strengths(make_levels([0, 10], [0.2, 0.201], [1.0, 1.0], noise=0.5), 1.3, bootstrap=BOOTSTRAP)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(-30, 50), st.integers(0, 40)), min_size=1, max_size=5))
def test_strengths_rise_and_keep_the_bound(steps: list[tuple[int, int]]) -> None:
    better, worse = np.array(steps).T / 100
    scores = [0.2, *(0.2 + np.cumsum(better))]
    ratios = [1.0, *np.cumprod(1 + worse)]
    try:
        found = find(scores, ratios)
    except DataError:
        return
    assert found.places[0] == 0
    assert (np.diff(found.places) > 0).all()
    assert (np.diff(found.scores) > 0).all()
    inside = next((n for n, ratio in enumerate(ratios) if ratio > 1.3), len(ratios))
    assert found.places[-1] <= 10 * min(inside, len(steps))
    assert (np.interp(found.places, 10.0 * np.arange(len(ratios)), ratios) <= 1.3 + 1e-9).all()
