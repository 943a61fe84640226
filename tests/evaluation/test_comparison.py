"""Two guides at equal perplexity and at equal KL, against sums by hand and over fine steps."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radq.errors import OptionError
from radq.evaluation.comparison import compare_at_equal, mean_difference
from radq.evaluation.estimates import Bootstrap
from radq.evaluation.metrics import ScoredTexts

QUICK = Bootstrap(resamples=200)


def texts(p: int = 4, n: int = 3) -> list[list[str]]:
    return [["a b"] * n for _ in range(p)]


def test_the_difference_of_two_lines_worked_by_hand() -> None:
    """y = 2x on [0, 4] and v = 1 on [2, 6]: over [2, 4] the difference grows from 3 to 7."""
    value, overlap = mean_difference(*map(np.array, ([0.0, 1, 4], [0.0, 2, 8], [2.0, 6], [1.0, 1])))
    assert value == pytest.approx(5)
    assert overlap == (2, 4)
    assert math.isnan(mean_difference(*map(np.array, ([0.0, 1], [0.0, 2], [2.0, 6], [1.0, 1])))[0])


points = st.lists(
    st.tuples(st.floats(0, 3), st.floats(-1, 1)), min_size=2, max_size=6, unique_by=lambda point: point[0]
)


@settings(max_examples=50, deadline=None)
@given(points, points)
def test_the_difference_equals_a_fine_sum(first: list, second: list) -> None:
    x, y = np.array(sorted(first)).T
    u, v = np.array(sorted(second)).T
    value, (low, high) = mean_difference(x, y, u, v)
    if high - low < 1e-3 or min(b - a for knots in (x, u) for a, b in pairwise(knots)) < 1e-2:
        return
    grid = low + (high - low) * (np.arange(40_000) + 0.5) / 40_000
    assert value == pytest.approx(np.mean(np.interp(grid, x, y) - np.interp(grid, u, v)), abs=1e-4)
    assert mean_difference(u, v, x, y)[0] == pytest.approx(-value)


def sweep(p: int, gain: float, seed: int, logs: tuple[float, ...] = (2.0, 2.5, 3.0)) -> list[ScoredTexts]:
    """Cells whose log perplexity is about `logs`, and whose score falls by `gain` for each unit of it."""
    rng = np.random.default_rng(seed)
    cells = []
    for log in logs:
        tokens = np.full((p, 2), 10)
        nll = 10 * np.log(np.exp(log) * (1 + rng.uniform(-0.1, 0.1, (p, 2))))
        scores = 0.8 - gain * (log - 2) + rng.uniform(-0.05, 0.05, (p, 2))
        cells.append(ScoredTexts(texts(p, 2), scores, nll, tokens))
    return cells


def test_guides_are_compared_at_equal_perplexity() -> None:
    strong, weak = sweep(50, 0.4, 0), sweep(50, 0.2, 1, (2.2, 2.8, 3.4))
    found = compare_at_equal("perplexity", strong, weak, "mean_score", QUICK)
    # over 2.2 to 3.0 the lines 0.8 − 0.4 (x − 2) and 0.8 − 0.2 (x − 2) lie 0.2 (2.6 − 2) apart on average
    assert found.value == pytest.approx(-0.12, abs=0.01)
    assert found.low < -0.12 < found.high
    assert found.high < 0
    assert found.range == pytest.approx((math.exp(2.2), math.exp(3)), rel=0.02)
    assert found.without_overlap == 0
    opposite = compare_at_equal("perplexity", weak, strong, "mean_score", QUICK)
    assert opposite.value == pytest.approx(-found.value)
    assert (opposite.low, opposite.high) == pytest.approx((-found.high, -found.low))
    assert compare_at_equal("perplexity", strong[::-1], strong, "mean_score", QUICK).value == pytest.approx(0)


def test_an_interval_of_a_comparison_is_that_of_its_resamples() -> None:
    first, second, bootstrap = sweep(9, 0.4, 0), sweep(9, 0.2, 1), Bootstrap(resamples=60, seed=2, confidence=0.9)
    found = compare_at_equal("perplexity", first, second, "avg_max", bootstrap)
    values = []
    for row in (row for part in bootstrap.choices(9) for row in part):
        rows = np.repeat(np.arange(9), row)
        resampled = [[cell.take(rows) for cell in cells] for cells in (first, second)]
        values.append(compare_at_equal("perplexity", *resampled, "avg_max", Bootstrap(resamples=1)).value)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(values, [0.05, 0.95])))


def test_guides_that_cannot_be_compared() -> None:
    cells = sweep(5, 0.4, 0)
    with pytest.raises(OptionError, match="no common perplexity: 7.* for one and .* for the other.*overlap"):
        compare_at_equal("perplexity", cells, sweep(5, 0.4, 0, (4.0, 5.0)), "mean_score")
    with pytest.raises(OptionError, match="same prompts, got 5 to 6"):
        compare_at_equal("perplexity", cells, sweep(6, 0.4, 0), "mean_score")
    with pytest.raises(OptionError, match="at least 2 values of β, got 1"):
        compare_at_equal("perplexity", cells[:1], cells, "mean_score")
    with pytest.raises(OptionError, match="mauve is no mean over prompts"):
        compare_at_equal("perplexity", cells, cells, "mauve")
    with pytest.raises(OptionError, match="equal 'dist_2'.*perplexity, kl"):
        compare_at_equal("dist_2", cells, cells, "mean_score")
    with pytest.raises(OptionError, match="kl needs drawn_nll"):
        compare_at_equal("kl", cells, cells, "mean_score")


def at_divergences(cells: list[ScoredTexts], divergences: tuple[float, ...]) -> list[ScoredTexts]:
    """The same cells with a KL per token of their own."""
    pairs = zip(cells, divergences, strict=True)
    return [replace(cell, drawn_nll=cell.nll - kl * cell.tokens) for cell, kl in pairs]


def test_guides_are_compared_at_equal_kl() -> None:
    strong = at_divergences(sweep(50, 0.4, 0), (0.0, 0.5, 1.0))
    weak = at_divergences(sweep(50, 0.2, 1), (0.2, 0.7, 1.2))
    found = compare_at_equal("kl", strong, weak, "mean_score", QUICK)
    # over 0.2 to 1.0 the lines 0.8 − 0.4 x and 0.8 − 0.2 (x − 0.2) lie 0.2 · 0.6 + 0.04 apart on average
    assert found.value == pytest.approx(-0.16, abs=0.01)
    assert found.low < found.value < found.high < 0
    assert found.range == pytest.approx((0.2, 1.0))
    with pytest.raises(OptionError, match="no common KL: 0 to 1 for one and 2 to 3 for the other"):
        compare_at_equal("kl", strong, at_divergences(weak, (2.0, 2.5, 3.0)), "mean_score")
