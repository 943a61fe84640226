"""MAUVE: how close samples are to those of another source, by features of their texts.

Axes: p prompts, n samples of each, d features.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import NormalDist

import numpy as np
from jaxtyping import Float

from radq.errors import OptionError, require_package
from radq.evaluation.estimates import DEFAULT_BOOTSTRAP, Bootstrap, Estimate

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
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
