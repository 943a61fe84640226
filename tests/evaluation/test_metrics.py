"""Metrics against numbers worked by hand, brute force and other libraries; intervals against what they promise."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from radq.errors import ModelError, OptionError
from radq.evaluation.estimates import TRUSTED_PROMPTS, Bootstrap, Sums, estimate, estimate_change
from radq.evaluation.metrics import (
    METRICS,
    ScoredTexts,
    average_maximum,
    check_metric,
    corpus_perplexity,
    distinct,
    divergence,
    estimate_mauve,
    mauve,
    mean_perplexity,
    mean_score,
    measure,
    perplexities,
    positive_rate,
    repetition,
    toxic_rate,
)

NAN, INF = math.nan, math.inf
SCORES = np.array([[0.1, 0.9, 0.3], [0.5, 0.2, 0.4], [NAN, 0.6, 0.8], [NAN, NAN, NAN]])
QUICK = Bootstrap(resamples=200)


def texts(p: int = 4, n: int = 3) -> list[list[str]]:
    return [["a b"] * n for _ in range(p)]


# --- attributes ---


def test_attributes_worked_by_hand() -> None:
    """Highest are 0.9, 0.5 and 0.8; above 0.5 are 1 of 3, 0 of 3 (0.5 is not above) and 2 of 2; the last is blank."""
    assert average_maximum(SCORES).value == pytest.approx((0.9 + 0.5 + 0.8) / 3)
    assert toxic_rate(SCORES).value == pytest.approx(2 / 3)
    assert positive_rate(SCORES).value == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert mean_score(SCORES).value == pytest.approx((1.3 / 3 + 1.1 / 3 + 0.7) / 3)
    for metric in (average_maximum, toxic_rate, positive_rate, mean_score):
        assert metric(SCORES).skipped == 4
        assert math.isnan(metric(SCORES[3:]).value)


scores_with_blanks = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 6), st.integers(1, 5)),
    elements=st.one_of(st.just(NAN), st.floats(0, 1)),
)


@given(scores_with_blanks)
def test_attributes_equal_brute_force(scores: np.ndarray) -> None:
    rows = [[s for s in row if s == s] for row in scores.tolist()]
    rows = [row for row in rows if row]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else NAN

    wanted: dict[Callable[[np.ndarray], Sums], float] = {
        average_maximum: mean([max(row) for row in rows]),
        toxic_rate: mean([float(any(s > 0.5 for s in row)) for row in rows]),
        positive_rate: mean([mean([float(s > 0.5) for s in row]) for row in rows]),
        mean_score: mean([mean(row) for row in rows]),
    }
    for metric, value in wanted.items():
        assert metric(scores).value == pytest.approx(value, nan_ok=True)
        assert metric(scores).skipped == np.isnan(scores).sum()


# --- perplexity ---


def test_perplexity_worked_by_hand() -> None:
    """Perplexities 2, 8 and 4 over 1, 1 and 4 tokens; a blank and an impossible continuation."""
    nll = np.array([[math.log(2), math.log(8)], [4 * math.log(4), 0.0], [INF, 0.0]])
    tokens = np.array([[1, 1], [4, 0], [2, 0]])
    items = mean_perplexity(nll, tokens)
    assert items.value == pytest.approx((2 + 8 + 4) / 3)
    corpus = corpus_perplexity(nll, tokens)
    assert corpus.value == pytest.approx(2 ** ((1 + 3 + 4 * 2) / 6))
    assert (items.skipped, items.infinite) == (corpus.skipped, corpus.infinite) == (2, 1)
    np.testing.assert_allclose(perplexities(nll, tokens), [[2, 8], [4, NAN], [INF, NAN]])


def test_a_perplexity_beyond_all_numbers_is_infinite_and_large_ones_stay() -> None:
    nll, tokens = np.array([[2000.0, 1.0, 20.0]]), np.array([[2, 1, 1]])
    assert mean_perplexity(nll, tokens).infinite == 1
    assert mean_perplexity(nll, tokens).value == pytest.approx(
        (math.e + math.exp(20)) / 2
    )  # above 1e5, and still there
    estimated = measure(["perplexity", "corpus_perplexity"], ScoredTexts([["a"] * 3], nll=nll, tokens=tokens))
    assert estimated["perplexity"].infinite == 1
    assert estimated["corpus_perplexity"].value == pytest.approx(math.exp(2021 / 4))


# --- diversity ---


def test_repetition_worked_by_hand() -> None:
    # of "a b a b a", the bigrams are ab ba ab ba: two of four came before; "c" has none
    assert repetition([["a b a b a", "c"], ["a b c", " "]]).value == pytest.approx(0.5 / 3)
    assert repetition([["a b a b a", "c"], ["a b c", " "]]).skipped == 1
    assert repetition([["a b", "a b"]]).value == 0  # another sample's bigrams do not count
    assert math.isnan(repetition([[" "]]).value)


def test_divergence_worked_by_hand() -> None:
    nll, drawn = np.array([[3.0, 5.0], [0.0, 2.0]]), np.array([[1.0, 2.0], [0.0, 3.0]])
    tokens = np.array([[2, 4], [0, 2]])
    found = divergence(nll, drawn, tokens)
    assert found.value == pytest.approx((2 + 3 - 1) / 8)
    assert (found.skipped, found.infinite) == (1, 0)
    nll[0, 1] = np.inf
    assert divergence(nll, drawn, tokens).value == pytest.approx((2 - 1) / 4)
    assert divergence(nll, drawn, tokens).infinite == 1
    with pytest.raises(OptionError, match="kl needs drawn_nll"):
        measure(["kl"], ScoredTexts([["a"] * 2] * 2, nll=nll, tokens=tokens))


def test_distinct_worked_by_hand() -> None:
    """First prompt: the words a b a | a b: {a, b}, {ab, ba}, {aba} over 5 words; second: " c" has an empty word."""
    samples = [["a b a", "a b"], [" c", "  "]]
    assert distinct(samples, 1).value == pytest.approx((2 / 5 + 2 / 2) / 2)
    assert distinct(samples, 2).value == pytest.approx((2 / 5 + 1 / 2) / 2)
    assert distinct(samples, 3).value == pytest.approx((1 / 5 + 0 / 2) / 2)
    assert distinct(samples, 1).skipped == 1
    assert distinct([["", " "], ["a"]], 1).value == 1
    assert distinct([["a\nb c"]], 2).value == pytest.approx(1 / 2)  # only spaces separate


@given(
    st.lists(st.lists(st.text("ab ", max_size=8), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(1, 3)
)
def test_distinct_equals_brute_force(samples: list[list[str]], order: int) -> None:
    ratios = []
    for prompt in samples:
        grams, words = set(), 0
        for text in prompt:
            if text.strip():
                row = text.split(" ")
                words += len(row)
                grams |= {"_".join(gram) for gram in zip(*(row[n:] for n in range(order)), strict=False)}
        if words:
            ratios.append(len(grams) / words)
    assert distinct(samples, order).value == pytest.approx(np.mean(ratios) if ratios else NAN, nan_ok=True)


# --- MAUVE ---


def cloud(n: int, shift: float = 0.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 8)) + shift


def test_mauve_is_that_of_the_package_with_the_papers_settings(capfd: pytest.CaptureFixture[str]) -> None:
    from mauve import compute_mauve

    p, q = cloud(100), cloud(120, 0.5, seed=1)
    theirs = compute_mauve(
        p_features=p, q_features=q, num_buckets=10, kmeans_max_iter=500, mauve_scaling_factor=5, seed=0
    )
    capfd.readouterr()
    assert mauve(p, q) == pytest.approx(theirs.mauve)
    assert capfd.readouterr().err == ""
    assert mauve(p, p) == pytest.approx(1)
    assert mauve(p, q + 50) < 0.01
    assert mauve(np.ones((30, 4)), np.ones((30, 4))) == pytest.approx(1)


def test_mauve_has_an_interval_and_leaves_blanks_out() -> None:
    ours, theirs = cloud(120).reshape(40, 3, 8), cloud(80, 0.3, seed=1).reshape(40, 2, 8)
    ours[0, 0] = ours[7, 2] = theirs[3, 1] = NAN
    found = estimate_mauve(ours, theirs, Bootstrap(resamples=5))
    assert found.skipped == 3
    assert found.low < found.value < found.high
    assert found == estimate_mauve(ours, theirs, Bootstrap(resamples=5))
    flat = ours.reshape(-1, 8)
    assert found.value == mauve(flat[~np.isnan(flat).any(1)], np.delete(theirs.reshape(-1, 8), 7, axis=0))
    assert (
        measure(["mauve"], ScoredTexts(texts(40), features=ours, reference=theirs), Bootstrap(resamples=5))["mauve"]
        == found
    )


def test_mauve_needs_samples_and_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="at least 20 samples, got 19"):
        mauve(cloud(19), cloud(100))
    monkeypatch.setitem(__import__("sys").modules, "mauve", None)
    with pytest.raises(ModelError, match=r"mauve.*pip install 'radq\[eval\]'"):
        mauve(cloud(20), cloud(20))


# --- intervals ---


def test_resamples_are_sums_over_drawn_prompts() -> None:
    columns = np.random.default_rng(0).random((7, 3))
    bootstrap = Bootstrap(resamples=250, seed=3)
    counts = np.concatenate(list(bootstrap.choices(7)))
    assert counts.shape == (250, 7)
    assert (counts.sum(1) == 7).all()
    wanted = [columns[np.repeat(np.arange(7), row)].sum(0) for row in counts]
    np.testing.assert_allclose(bootstrap.sums(columns), wanted)
    np.testing.assert_array_equal(counts, np.concatenate(list(Bootstrap(250, seed=3).choices(7))))
    assert (counts != np.concatenate(list(Bootstrap(250, seed=4).choices(7)))).any()
    np.testing.assert_allclose(counts.mean(0), 1, atol=0.25)


def test_changes_resample_the_same_prompts_of_both() -> None:
    rng = np.random.default_rng(0)
    guided, unguided = rng.random((9, 3)), rng.random((9, 3))
    guided[0], unguided[1, 0] = np.nan, np.nan  # a prompt with blanks alone, and one blank
    bootstrap = Bootstrap(resamples=60, seed=2, confidence=0.9)
    found = estimate_change(mean_score(guided), mean_score(unguided), bootstrap)
    values = []
    for counts in np.concatenate(list(bootstrap.choices(9))):
        rows = np.repeat(np.arange(9), counts)
        values.append(mean_score(guided[rows]).value - mean_score(unguided[rows]).value)
    assert found.value == pytest.approx(mean_score(guided).value - mean_score(unguided).value)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(values, [0.05, 0.95])))
    assert found.skipped == 4


def test_a_change_is_surer_than_its_ends() -> None:
    """A prompt that scores high scores high in both: their difference varies less than either."""
    rng = np.random.default_rng(0)
    unguided = np.repeat(rng.random((40, 1)), 3, axis=1)
    found = estimate_change(mean_score(unguided + 0.1), mean_score(unguided), QUICK)
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert found.doubt(len(unguided)) == ""
    alone = estimate_change(mean_score(unguided[:1] + 0.1), mean_score(unguided[:1]), QUICK)
    assert math.isnan(alone.low)
    assert alone.doubt(1) == "there is no interval"


def test_intervals_are_too_narrow_below_the_trusted_number_of_prompts() -> None:
    """The share of 95% intervals that hold the true mean: near 0.95 from `TRUSTED_PROMPTS` on, and not from five."""
    rng = np.random.default_rng(0)

    def coverage(p: int) -> float:
        drawn = (estimate(mean_score(rng.normal(size=(p, 1))), QUICK) for _ in range(400))
        return float(np.mean([one.low <= 0 <= one.high for one in drawn]))

    assert coverage(5) < 0.88
    assert coverage(TRUSTED_PROMPTS) > 0.9


def test_intervals_are_percentiles_of_the_resampled_metric() -> None:
    bootstrap = Bootstrap(resamples=300, seed=1, confidence=0.8)
    rng = np.random.default_rng(0)
    scores, nll, tokens = rng.random((12, 4)), rng.random((12, 4)) * 20, rng.integers(0, 9, (12, 4))
    cell = ScoredTexts(texts(12, 4), scores, nll, tokens)
    draws = [np.repeat(np.arange(12), row) for part in bootstrap.choices(12) for row in part]
    for name in ("avg_max", "toxic_rate", "positive_rate", "perplexity", "corpus_perplexity"):
        values = [METRICS[name].sums(cell.take(rows)).value for rows in draws]
        found = measure([name], cell, bootstrap)[name]
        assert (found.low, found.high) == pytest.approx(tuple(np.quantile(values, [0.1, 0.9])))
        assert found.value == METRICS[name].sums(cell).value


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for n in range(200):
        found = estimate(mean_score(rng.random((60, 2)) ** 2), Bootstrap(resamples=300, seed=n))
        held += found.low <= 1 / 3 <= found.high
    assert 175 <= held <= 199


def test_of_one_prompt_or_none_that_is_known_there_is_no_interval() -> None:
    assert math.isnan(estimate(average_maximum(SCORES[:1])).low)
    found = estimate(average_maximum(SCORES[3:].repeat(5, axis=0)), QUICK)
    assert math.isnan(found.value)
    assert math.isnan(found.high)
    assert found.skipped == 15


@settings(max_examples=30)
@given(scores_with_blanks, st.randoms(use_true_random=False))
def test_metrics_do_not_depend_on_the_order_of_samples_and_prompts(scores: np.ndarray, random: object) -> None:
    order = list(range(len(scores)))
    random.shuffle(order)
    for metric in (average_maximum, toxic_rate, positive_rate, mean_score):
        assert metric(scores[order][:, ::-1]).value == pytest.approx(metric(scores).value, nan_ok=True)


# --- by name ---


def test_cells_are_measured_by_name() -> None:
    cell = ScoredTexts(texts(), SCORES)
    found = measure(["avg_max", "dist_1"], cell, QUICK)
    assert found["avg_max"] == estimate(average_maximum(SCORES), QUICK)
    assert found["dist_1"].value == pytest.approx(2 / 6)
    negative = cell.take([1, 0])
    assert measure(["avg_max"], negative, QUICK)["avg_max"].value == pytest.approx(0.7)


def test_mistakes_are_named() -> None:
    with pytest.raises(OptionError, match="no metric 'bleu'.*avg_max, toxic_rate.*mauve"):
        measure(["avg_max", "bleu"], ScoredTexts(texts(), SCORES))
    with pytest.raises(OptionError, match="'rouge'"):
        check_metric("rouge")
    with pytest.raises(OptionError, match="perplexity needs nll"):
        measure(["perplexity"], ScoredTexts(texts()))
    for nothing in ([], [[]], [["a"], []]):
        with pytest.raises(OptionError, match="no samples"):
            ScoredTexts(nothing)
    with pytest.raises(OptionError, match="same number of samples, got 1 to 2"):
        ScoredTexts([["a", "b"], ["a"]])
    with pytest.raises(OptionError, match="scores are for 4 prompts × 3 samples, the texts for 5 × 3"):
        ScoredTexts(texts(5), SCORES)
    for wrong in ({"resamples": 0}, {"confidence": 1.0}, {"confidence": NAN}):
        with pytest.raises(OptionError, match=f"{next(iter(wrong))} must be"):
            Bootstrap(**wrong)
