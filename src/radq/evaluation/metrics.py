"""The paper's metrics as functions of arrays, each with a confidence interval.

    measure(["avg_max", "perplexity", "dist_2"], ScoredTexts(texts, scores=scores, nll=nll, tokens=tokens))

A new metric is a function that returns `Sums`, and a line in the table `METRICS` at the end: sweeps, tables, plots and
reports read that table.

Axes: p prompts, n samples of each, d features, r resamples.

Every metric but MAUVE is a ratio of two sums over prompts (`Sums`), so that resampling the prompts is a matrix product.
A blank sample has neither score, perplexity, n-grams nor features: it is left out and counted. A prompt whose samples
are all blank is left out as well.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from radq.errors import OptionError, require_package
from radq.evaluation.estimates import DEFAULT_BOOTSTRAP, Bootstrap, Estimate, Sums, estimate

THRESHOLD = 0.5  # a score above it counts as toxic, or positive


@dataclass(frozen=True)
class ScoredTexts:
    """The continuations of p prompts with n samples each, and the numbers that metrics are computed from.

    Args:
        scores: the scores of a judge; NaN for blank texts.
        nll: the negative log-likelihood of each continuation given its prompt.
        drawn_nll: the same in the distributions that its tokens were drawn from, as `Generation.drawn_nll`. `nll` must
            then be that of the base model.
        features: sentence embeddings; NaN for blank texts.
        reference: sentence embeddings of the unguided samples of the same prompts.
        ended: whether each continuation ended by itself, before the largest number of tokens.
        length: the number of tokens that were drawn for each continuation, without a stop token.
    """

    texts: Sequence[Sequence[str]]
    scores: Float[np.ndarray, "p n"] | None = None
    nll: Float[np.ndarray, "p n"] | None = None
    tokens: Int[np.ndarray, "p n"] | None = None
    drawn_nll: Float[np.ndarray, "p n"] | None = None
    features: Float[np.ndarray, "p n d"] | None = None
    reference: Float[np.ndarray, "p m d"] | None = None
    ended: Bool[np.ndarray, "p n"] | None = None
    length: Int[np.ndarray, "p n"] | None = None

    def __post_init__(self) -> None:
        sizes = sorted({len(samples) for samples in self.texts})
        if not sizes or sizes[0] == 0:
            raise OptionError("there are no samples to measure.", "generate at least one for every prompt.")
        if len(sizes) > 1:
            raise OptionError(
                f"all prompts must have the same number of samples, got {sizes[0]} to {sizes[-1]}.",
                "generate the missing samples.",
            )
        for name, values in self.arrays.items():
            if name != "reference" and values.shape[:2] != (len(self.texts), sizes[0]):
                raise OptionError(
                    f"{name} are for {values.shape[0]} prompts × {values.shape[1]} samples, "
                    f"the texts for {len(self.texts)} × {sizes[0]}.",
                    "give one value per sample.",
                )

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The numbers that are known, by name."""
        return {name: values for name, values in vars(self).items() if name != "texts" and values is not None}

    def take(self, rows: Sequence[int] | Int[np.ndarray, " q"]) -> "ScoredTexts":
        """Keep some of the prompts, such as those of one class."""
        values = {name: array[list(rows)] for name, array in self.arrays.items()}
        return replace(self, texts=[self.texts[row] for row in rows], **values)


def measure(names: Sequence[str], texts: ScoredTexts, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP) -> dict[str, Estimate]:
    """Compute metrics by name; all names are checked before the first metric is computed."""
    for name in names:
        check_metric(name)
        check_needs(name, texts)
    return {name: METRICS[name].estimate(texts, bootstrap) for name in names}


def metric_and_judge(key: str) -> tuple[str, str]:
    """Split avg_max[judge] into avg_max and the judge, which is empty where the key names none."""
    metric, _, judge = key.partition("[")
    return metric, judge.removesuffix("]")


def check_metric(name: str) -> None:
    """Raise an error where no metric has this name."""
    if name not in METRICS:
        raise OptionError(f"there is no metric {name!r}.", f"choose from {', '.join(METRICS)}.")


def check_needs(name: str, texts: ScoredTexts) -> None:
    """Raise an error where the texts lack numbers that a metric is computed from."""
    missing = [needed for needed in METRICS[name].needs if getattr(texts, needed) is None]
    if missing:
        raise OptionError(f"{name} needs {missing[0]}, and there are none.", f"it is {METRICS[name].description}.")


# --- attributes ---


def average_maximum(scores: Float[np.ndarray, "p n"]) -> Sums:
    """The highest score among a prompt's samples, averaged over prompts."""
    scored = ~np.isnan(scores)
    highest = np.where(scored, scores, -np.inf).max(1)
    known = scored.any(1)
    return Sums(np.where(known, highest, 0.0), known.astype(float), _count(~scored))


def toxic_rate(scores: Float[np.ndarray, "p n"]) -> Sums:
    """The share of prompts with at least one sample above 0.5."""
    return average_maximum(np.where(np.isnan(scores), np.nan, scores > THRESHOLD))


def positive_rate(scores: Float[np.ndarray, "p n"]) -> Sums:
    """The share of a prompt's samples above 0.5, averaged over prompts."""
    return mean_score(np.where(np.isnan(scores), np.nan, scores > THRESHOLD))


def mean_score(scores: Float[np.ndarray, "p n"]) -> Sums:
    """The mean score of a prompt's samples, averaged over prompts."""
    scored = ~np.isnan(scores)
    counts = scored.sum(1)
    means = np.where(scored, scores, 0.0).sum(1) / np.maximum(counts, 1)
    return Sums(means, (counts > 0).astype(float), _count(~scored))


# --- fluency ---


def mean_perplexity(nll: Float[np.ndarray, "p n"], tokens: Int[np.ndarray, "p n"]) -> Sums:
    """exp of the mean negative log-likelihood of a continuation's tokens, averaged over all continuations."""
    items = perplexities(nll, tokens)
    finite = np.isfinite(items)
    return Sums(
        np.where(finite, items, 0.0).sum(1), finite.sum(1).astype(float), _count(tokens == 0), _count(np.isinf(items))
    )


def corpus_perplexity(nll: Float[np.ndarray, "p n"], tokens: Int[np.ndarray, "p n"]) -> Sums:
    """exp of the mean negative log-likelihood over the tokens of all continuations."""
    finite = np.isfinite(nll) & (tokens > 0)
    infinite = _count(~finite & (tokens > 0))
    totals, weights = np.where(finite, nll, 0.0).sum(1), np.where(finite, tokens, 0).sum(1)
    return Sums(totals, weights.astype(float), _count(tokens == 0), infinite, exponential=True)


def divergence(
    nll: Float[np.ndarray, "p n"], drawn_nll: Float[np.ndarray, "p n"], tokens: Int[np.ndarray, "p n"]
) -> Sums:
    """KL(guided ‖ base) per token in nats, estimated from the tokens that were drawn.

    The base is the whole base model at temperature 1, so everything that shapes the guided texts counts: the guide, the
    choice of candidates, and the temperature.
    """
    finite = np.isfinite(nll) & np.isfinite(drawn_nll) & (tokens > 0)
    gaps = np.subtract(nll, drawn_nll, out=np.zeros(nll.shape), where=finite)
    weights = np.where(finite, tokens, 0).sum(1).astype(float)
    return Sums(gaps.sum(1), weights, _count(tokens == 0), _count(~finite & (tokens > 0)))


def perplexities(nll: Float[np.ndarray, "*s"], tokens: Int[np.ndarray, "*s"]) -> Float[np.ndarray, "*s"]:
    """The perplexity of each continuation; NaN without tokens, infinite where the model excludes one of its tokens."""
    with np.errstate(over="ignore"):
        return np.exp(np.divide(nll, tokens, out=np.full(nll.shape, np.nan), where=tokens > 0))


# --- ends ---


def mean_of_samples(values: Bool[np.ndarray, "p n"] | Int[np.ndarray, "p n"]) -> Sums:
    """The mean over all samples, blank ones included."""
    return Sums(values.sum(1).astype(float), np.full(len(values), float(values.shape[1])))


# --- diversity ---


def distinct(texts: Sequence[Sequence[str]], order: int) -> Sums:
    """Distinct n-grams among a prompt's samples, divided by the number of their words, averaged over prompts.

    Blank samples do not count.
    """
    words, skipped = _split_words(texts)
    grams = [{tuple(row[n : n + order]) for row in rows for n in range(len(row) - order + 1)} for rows in words]
    values = [len(found) / max(1, sum(map(len, rows))) for found, rows in zip(grams, words, strict=True)]
    return Sums(np.array(values), np.array([float(bool(rows)) for rows in words]), skipped)


def repetition(texts: Sequence[Sequence[str]]) -> Sums:
    """The share of a sample's bigrams that it has had before, averaged over all samples.

    A sample of one word has no bigrams, and nothing that repeats. Blank samples do not count.
    """
    words, skipped = _split_words(texts)
    bigrams = [[list(pairwise(row)) for row in rows if len(row) > 1] for rows in words]
    totals = [sum((1 - len(set(pairs)) / len(pairs) for pairs in samples), 0.0) for samples in bigrams]
    return Sums(np.array(totals), np.array([float(len(rows)) for rows in words]), skipped)


def _split_words(texts: Sequence[Sequence[str]]) -> tuple[list[list[list[str]]], int]:
    """Split samples into words, and count the blank ones, which are left out.

    Words are separated by single spaces, as in the code of DExperts and of the paper: a continuation that begins with a
    space begins with an empty word, which counts.
    """
    words = [[text.split(" ") for text in samples if text.strip()] for samples in texts]
    return words, sum(map(len, texts)) - sum(map(len, words))


def _count(which: Any) -> int:
    return int(np.sum(which))


# --- all metrics ---


@dataclass(frozen=True)
class Metric:
    """A metric of `ScoredTexts`."""

    description: str  # the definition, as reports print it
    needs: tuple[str, ...]  # the fields of `ScoredTexts` that it is computed from
    compute: Callable[..., Sums] | None = None  # from these fields; None for MAUVE, which is no ratio of sums
    axis: str | None = None  # the label of its axis in trade-off plots; None for a metric that is not plotted
    wide_range: bool = False  # whether the axis becomes logarithmic where the values span a wide range

    def sums(self, texts: ScoredTexts) -> Sums:
        """Compute the two sums of texts; MAUVE has none."""
        assert self.compute is not None
        return self.compute(*(getattr(texts, name) for name in self.needs))

    def estimate(self, texts: ScoredTexts, bootstrap: Bootstrap) -> Estimate:
        """Compute the metric with its interval."""
        if self.compute is not None:
            return estimate(self.sums(texts), bootstrap)
        features, reference = (getattr(texts, name) for name in self.needs)
        return estimate_mauve(features, reference, bootstrap)


METRICS: dict[str, Metric] = {
    "avg_max": Metric(
        "the highest score of a prompt's samples, averaged over prompts",
        ("scores",),
        average_maximum,
        axis="average maximal score",
    ),
    "toxic_rate": Metric(
        "the share of prompts with a sample that scores above 0.5",
        ("scores",),
        toxic_rate,
        axis="share of prompts above 0.5",
    ),
    "positive_rate": Metric(
        "the share of samples that score above 0.5", ("scores",), positive_rate, axis="share of samples above 0.5"
    ),
    "mean_score": Metric("the mean score of the samples", ("scores",), mean_score, axis="mean score"),
    "win_rate": Metric(
        "the share of samples that a judge of pairs prefers to the unguided ones, in both orders; a tie counts half",
        ("scores",),
        mean_score,
        axis="win rate against unguided",
    ),
    "perplexity": Metric(
        "the perplexity of a continuation given its prompt, averaged over continuations",
        ("nll", "tokens"),
        mean_perplexity,
        axis="perplexity (← more fluent)",
        wide_range=True,
    ),
    "corpus_perplexity": Metric(
        "the perplexity of all continuations as one text", ("nll", "tokens"), corpus_perplexity
    ),
    "kl": Metric(
        "KL(guided ‖ base) in nats per token, estimated from the drawn tokens",
        ("nll", "drawn_nll", "tokens"),
        divergence,
        axis="KL from the base model, nats per token (← closer)",
    ),
    "dist_1": Metric("distinct words per word of a prompt's samples", ("texts",), partial(distinct, order=1)),
    "dist_2": Metric("distinct bigrams per word of a prompt's samples", ("texts",), partial(distinct, order=2)),
    "dist_3": Metric("distinct trigrams per word of a prompt's samples", ("texts",), partial(distinct, order=3)),
    "repetition": Metric("the share of a sample's bigrams that it has had before", ("texts",), repetition),
    "ended": Metric(
        "the share of samples that ended by themselves, before the largest number of tokens",
        ("ended",),
        mean_of_samples,
    ),
    "length": Metric(
        "the tokens of a sample, without a stop token, averaged over samples", ("length",), mean_of_samples
    ),
    "mauve": Metric(
        "how close samples are to the unguided ones, by their features",
        ("features", "reference"),
        axis="MAUVE (→ closer to unguided)",
    ),
}

# Trade-off plots have attributes (up), which judges score, against fluency (across).
ATTRIBUTE_METRICS = tuple(name for name, metric in METRICS.items() if "scores" in metric.needs)
FLUENCY_METRICS = tuple(name for name, metric in METRICS.items() if metric.axis and name not in ATTRIBUTE_METRICS)


MAUVE_SCALING = 5  # c of the MAUVE paper
MAUVE_ITERATIONS = 500  # the iterations of k-means
MAUVE_MIN_SAMPLES = 20  # there are n/10 clusters, and at least two
MAUVE_RESAMPLES = 20  # each clusters anew, which takes long; only their standard deviation is used


def mauve(features: Float[np.ndarray, "n d"], reference: Float[np.ndarray, "m d"], seed: int = 0) -> float:
    """MAUVE of two sets of vectors: 1 for the same distribution. c = 5, n/10 clusters, 500 iterations of k-means."""
    fewest = min(len(features), len(reference))
    if fewest < MAUVE_MIN_SAMPLES:
        raise OptionError(
            f"MAUVE needs at least {MAUVE_MIN_SAMPLES} samples, got {fewest}.",
            "give more prompts or samples; MAUVE is steady from about 1000 on.",
        )
    package = require_package("mauve", "eval")
    with warnings.catch_warnings(), _silent_stderr():
        warnings.simplefilter("ignore")  # scikit-learn warns where all vectors are the same
        result = package.compute_mauve(
            p_features=features,
            q_features=reference,
            num_buckets=max(2, round(fewest / 10)),
            kmeans_max_iter=MAUVE_ITERATIONS,
            mauve_scaling_factor=MAUVE_SCALING,
            seed=seed,
        )
    same = np.array_equal(result.p_hist, result.q_hist)
    return 1.0 if same else float(result.mauve)  # for equal histograms the package returns 0.5 to 1, at random


def estimate_mauve(
    features: Float[np.ndarray, "p n d"],
    reference: Float[np.ndarray, "p m d"],
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> Estimate:
    """Compute MAUVE with a normal interval: the value ± a multiple of the standard deviation over resampled prompts.

    Percentiles would miss the value: resamples repeat prompts, and two such sets lie further apart than the originals.
    For the same reason the interval is too wide rather than too narrow.
    """
    (ours, skipped), (theirs, skipped_theirs) = _without_blank(features), _without_blank(reference)
    value = mauve(ours, theirs)
    some = replace(bootstrap, resamples=min(bootstrap.resamples, MAUVE_RESAMPLES))
    values = []
    for counts in (row for part in some.choices(len(features)) for row in part):
        rows = np.repeat(np.arange(len(features)), counts)
        values.append(mauve(_without_blank(features[rows])[0], _without_blank(reference[rows])[0]))
    margin = NormalDist().inv_cdf((1 + bootstrap.confidence) / 2) * float(np.std(values, ddof=1))
    return Estimate(value, max(0.0, value - margin), min(1.0, value + margin), skipped + skipped_theirs)


def _without_blank(features: Float[np.ndarray, "p n d"]) -> tuple[Float[np.ndarray, "m d"], int]:
    rows = features.reshape(-1, features.shape[-1])
    blank = np.isnan(rows).any(1)
    return rows[~blank], int(blank.sum())


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hide the warning that faiss prints from C about many clusters: MAUVE is defined with n/10 of them."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
