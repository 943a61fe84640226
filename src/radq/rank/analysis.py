"""The answer to "will RAD-Q fit my data?", from the ranks at which the reward matrix of labels, and that of shuffled
labels, can be completed, and from the cost of frozen embeddings.

The verdict is the first of these that holds:

    embeddings    the frozen embeddings of the backbone cost more than ε, which is proved whatever the ranks are
    no-rank       no rank that was tried meets the labels
    hidden-size   the smallest rank that meets them is more than the hidden size of the backbone
    sparse        shuffled labels are met at that rank too, so the rank says nothing about the labels
    unchecked     shuffled labels were not tried, since the matrix was saved without them
    no-obstacle   the labels are met at a rank at which shuffled ones are not
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from radq.data.dataset import NO_LIMIT, load_data
from radq.data.examples import DataColumns
from radq.errors import DataError, ModelError
from radq.models.loading import hidden_size, load_config
from radq.models.vocabulary import read_vocabulary
from radq.rank.completion import Factors, check_rank, complete, degeneracy
from radq.rank.config import DataRankConfig
from radq.rank.embedding_bound import BoundedRow, EmbeddingBound, check_backbone_tokens
from radq.rank.matrix import Observed, RewardMatrix, build_matrix, shuffle_labels
from radq.sources.model_source import ModelSource

NAMED_PREFIXES = 4
PREFIX_CHARACTERS = 40
MARGIN = 10  # shuffled labels count as met up to this times ε: so near to ε, errors depend on penalty and stopping
WITHOUT_BACKBONE = "The cost of frozen embeddings was not computed: name a backbone with --backbone."
WITHOUT_TOKENS = (
    "The cost of its frozen embeddings is not known: the matrix was saved without its vocabulary. Make it again from "
    "the data."
)


def read_matrix(config: DataRankConfig, progress: bool = False) -> RewardMatrix:
    """Build the reward matrix of data files, or read the one that a single .npz file holds, and save it if asked to."""
    matrix = RewardMatrix.load(config.files[0]) if config.reads_matrix else _build_from_files(config, progress)
    if config.save_matrix is not None:
        matrix.save(config.save_matrix)
    return matrix


def _build_from_files(config: DataRankConfig, progress: bool) -> RewardMatrix:
    labels = config.label_columns
    tokenizer = ModelSource.find(config.tokenizer or str(config.backbone)).tokenizer
    vocabulary = read_vocabulary(max(len(tokenizer), 1 + max(tokenizer.get_vocab().values())), tokenizer)
    if config.tokenizer and config.backbone is not None:
        check_backbone_tokens(config.backbone, vocabulary)
    columns = DataColumns(config.text, labels, config.prompt, config.weight, config.label_rules, config.skip_empty)
    max_length = NO_LIMIT if config.max_length is None else config.max_length
    data = load_data(config.files, tokenizer, columns, max_length, config.cache, progress)
    if progress:
        for label, scale in zip(labels, data.scales, strict=True):
            print(scale.describe(label))
    shuffled = build_matrix(shuffle_labels(data, config.seed), vocabulary.size).omega2.values
    return replace(build_matrix(data, vocabulary.size, labels), shuffled=shuffled, vocabulary=vocabulary)


def describe_matrix(matrix: RewardMatrix) -> dict[str, Any]:
    """The sizes of a matrix and of its part Ω_2."""
    omega2 = matrix.omega2
    return {
        "attributes": list(matrix.attributes),
        "utterances": matrix.utterances,
        "prefixes": matrix.prefixes,
        "entries": matrix.entries,
        "ambiguous_entries": matrix.ambiguous,
        "contradicting_entries": matrix.contradicting,
        "omega2_rows": omega2.shape[0],
        "omega2_columns": omega2.shape[1],
        "omega2_entries": len(omega2),
        "omega2_value_sum": float(omega2.values.sum()),
    }


@dataclass(frozen=True)
class RankResult:
    """The error of the best completion of Ω_2 that was found at one rank."""

    rank: int
    mse: float  # over the entries of Ω_2, as in the paper's table
    mse_nm: float  # over all rows and columns of Ω_2, as in the paper's definition of the ε-rank
    iterations: int
    seconds: float
    bound: int | None  # upper bound of the minimal ε-rank of the whole matrix; None if the error is above ε


def suggest_ranks(matrix: RewardMatrix) -> list[int]:
    """Five ranks from 0 to twice the rank from which values in general position are met exactly."""
    enough = degeneracy(matrix.omega2)
    return sorted({min(rank, *matrix.omega2.shape) for rank in (0, enough // 4, enough // 2, enough, 2 * enough)})


def complete_ranks(
    config: DataRankConfig, matrix: RewardMatrix, device: str = "cpu", progress: bool = False
) -> tuple[list[RankResult], list[RankResult] | None]:
    """Complete Ω_2 at each rank, with the labels and with shuffled labels, and save certificates of the labels.

    If a rank meets shuffled labels too, then meeting the real ones at that rank says nothing about them. The shuffled
    results are None if the matrix does not hold shuffled labels.
    """
    omega2, shuffled = matrix.omega2, matrix.shuffled_omega2
    if not len(omega2):
        return [], []
    ranks = config.rank_numbers or suggest_ranks(matrix)
    for rank in ranks:  # a wrong rank is refused before the work on the others
        check_rank(omega2, rank)

    def solve(observed: Observed, rank: int, title: str, start: Factors | None = None) -> tuple[Factors, RankResult]:
        with tqdm(desc=title, unit="iteration", disable=not progress, leave=False) as bar:

            def show(mse: float) -> None:
                bar.set_postfix_str(f"MSE {mse:.2e}", refresh=False)
                bar.update()

            completion = complete(
                observed,
                rank,
                config.penalty,
                config.iterations,
                config.tolerance,
                target=config.eps,
                start=start,
                seed=config.seed,
                device=device,
                dtype=getattr(torch, config.dtype),
                progress=show,
            )
        fit = _describe_fit(matrix, rank, completion.mse)
        if completion.mse > config.eps:
            fit["bound"] = None
        return completion.factors, RankResult(**fit, iterations=completion.iterations, seconds=completion.seconds)

    results = []
    for rank in ranks:
        file = None if config.certificates is None else config.certificates / f"rank-{rank}.safetensors"
        start = Factors.load(file, omega2) if rank and file is not None and file.exists() else None
        factors, result = solve(omega2, rank, f"rank {rank}", start)
        results.append(result)
        if file is not None:
            factors.save(file, omega2)
    if shuffled is None:
        return results, None
    return results, [solve(shuffled, rank, f"rank {rank}, shuffled")[1] for rank in ranks]


def _describe_fit(matrix: RewardMatrix, rank: int, mse: float) -> dict[str, Any]:
    """The error of a completion of Ω_2, and the rank that the whole matrix needs at most if this error is a fit.

    Over all rows and columns, the unknown entries count as met.
    """
    n, m = matrix.omega2.shape
    bound = max(1, rank + rank_outside_omega2(matrix))
    return {"rank": rank, "mse": mse, "mse_nm": mse * len(matrix.omega2) / (n * m), "bound": bound}


def rank_outside_omega2(matrix: RewardMatrix) -> int:
    """The rank that rows with one continuation add at most: one per attribute, since constant rows meet them."""
    return len(matrix.attributes) if matrix.prefixes > len(matrix.omega2_rows) else 0


def check_certificate(matrix: RewardMatrix, certificate: str | Path) -> dict[str, Any]:
    """The rank and error of saved factors, computed from the factors and the matrix alone."""
    omega2 = matrix.omega2
    if not len(omega2):
        raise DataError(
            "the matrix has no prefix with two continuations.",
            "it needs no certificate: a matrix of rank 1 per attribute meets it.",
        )
    factors = Factors.load(certificate, omega2)
    return _describe_fit(matrix, factors.rank, factors.mse(omega2))


# --- the verdict ---


@dataclass(frozen=True)
class Verdict:
    code: str
    text: str


@dataclass(frozen=True)
class Backbone:
    """The facts about a language model that the verdict mentions."""

    name: str
    hidden_size: int

    @classmethod
    def read(cls, name: str) -> "Backbone":
        """Read the configuration of a language model by hub name or folder."""
        config = load_config(name).get_text_config()
        if not isinstance(getattr(config, "hidden_size", None), int):
            raise ModelError(
                f"the configuration of {name!r} has no hidden_size.", "choose a causal language model as backbone."
            )
        return cls(name, hidden_size(config))


def give_verdict(
    matrix: RewardMatrix,
    results: Sequence[RankResult],
    shuffled: Sequence[RankResult] | None,
    eps: float,
    backbone: Backbone | None = None,
    embedding_bound: EmbeddingBound | None = None,
) -> Verdict:
    """Say whether RAD-Q can fit the labels, from completions with an error of `eps` or less, which counts as a fit."""
    about_rank = _judge_rank(matrix, results, shuffled, eps, backbone)
    if backbone is None:
        return replace(about_rank, text=f"{about_rank.text} {WITHOUT_BACKBONE}")
    if embedding_bound is None:
        return replace(about_rank, text=f"{about_rank.text} {WITHOUT_TOKENS}")
    if embedding_bound.mse_omega2 <= eps:
        return about_rank
    several = len(embedding_bound.attributes) > 1
    named = ", ".join(
        f"{quote_prefix(row)} ({f'{row.attribute}, ' if several else ''}{row.mse:.2g})"
        for row in embedding_bound.rows[:NAMED_PREFIXES]
    )
    more = embedding_bound.costly_rows - NAMED_PREFIXES
    return Verdict(
        "embeddings",
        f"frozen embeddings cost at least {embedding_bound.mse_omega2:.2g} over Ω_2 "
        f"({embedding_bound.weighted_loss:.2g} of the training loss), at these prefixes: "
        f"{named}{f' and {more} more' if more > 0 else ''}. No RAD-Q with a linear head over {backbone.name} has a "
        f"smaller error; an mlp head and RAD-V are not bound by it. Judged by rank alone: {about_rank.text}",
    )


def _judge_rank(
    matrix: RewardMatrix,
    results: Sequence[RankResult],
    shuffled: Sequence[RankResult] | None,
    eps: float,
    backbone: Backbone | None,
) -> Verdict:
    if not len(matrix.omega2):
        rank = max(1, rank_outside_omega2(matrix))
        return Verdict(
            "sparse",
            f"cannot tell: too sparse. No prefix has two continuations, so a matrix of rank {rank} meets every entry, "
            "whatever the labels are.",
        )
    reached = min((result for result in results if result.bound is not None), key=lambda r: r.rank, default=None)
    if reached is None:
        best = min(results, key=lambda result: result.mse)
        return Verdict(
            "no-rank",
            f"no rank tried reaches {eps:g} over Ω_2; the best was rank {best.rank} with {best.mse:.2g}. Try higher "
            f"ranks (values in general position are met from rank {degeneracy(matrix.omega2)} on) or prefer RAD-V.",
        )
    fit = (
        f"rank {reached.rank} meets the labels with an error of {reached.mse:.2g} ≤ {eps:g} over Ω_2, so the data "
        f"need rank {reached.bound} at most"
    )
    enough = f"any backbone with a hidden size of {reached.bound} or more has that rank"
    if backbone is not None:
        enough = f"RAD-Q over {backbone.name} has that rank: its hidden size is {backbone.hidden_size}"
        if (reached.bound or 0) > backbone.hidden_size:
            return Verdict(
                "hidden-size",
                f"{fit}, more than the hidden size {backbone.hidden_size} of {backbone.name}, which limits the rank of "
                "RAD-Q. Try lower ranks, a wider backbone, or RAD-V.",
            )
    if shuffled is None:
        return Verdict(
            "unchecked",
            f"{fit}; {enough}. Shuffled labels were not tried, since the matrix was saved without them. Make it "
            "again from the data.",
        )
    same_rank = next(result for result in shuffled if result.rank == reached.rank)
    found = f"{fit[0].upper()}{fit[1:]}, and {enough}."
    if same_rank.mse <= MARGIN * eps:
        return Verdict(
            "sparse",
            f"cannot tell: too sparse. {found} But shuffled labels are met about as well ({same_rank.mse:.2g}): the "
            "prefixes have so few continuations that the rank says nothing about the labels.",
        )
    return Verdict(
        "no-obstacle",
        f"rank is no obstacle. {found} Shuffled labels are not met at that rank: their error is {same_rank.mse:.2g}.",
    )


def quote_prefix(row: BoundedRow) -> str:
    """The end of a prefix in quotes, short enough for a line."""
    text = row.prefix
    if not text:
        return "the empty prefix"
    return repr(text if len(text) <= PREFIX_CHARACTERS else "…" + text[-PREFIX_CHARACTERS:])
