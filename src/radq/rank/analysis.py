"""Ranks at which a reward matrix can be completed, for the labels of a data set and for shuffled labels."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from radq.data.dataset import NO_LIMIT, load_data
from radq.data.examples import DataColumns
from radq.errors import DataError
from radq.models.vocabulary import read_vocabulary
from radq.rank.completion import Completion, Factors, check_rank, complete, degeneracy
from radq.rank.config import DataRankConfig
from radq.rank.embedding_bound import check_backbone_tokens
from radq.rank.matrix import Observed, RewardMatrix, build_matrix, shuffle_labels
from radq.sources.model_source import ModelSource


def read_matrix(config: DataRankConfig, progress: bool = False) -> RewardMatrix:
    """Build the reward matrix of data files, or read the one that a single .npz file holds, and save it if asked to."""
    matrix = RewardMatrix.load(config.files[0]) if config.reads_matrix else _build_from_files(config, progress)
    if config.save_matrix is not None:
        matrix.save(config.save_matrix)
    return matrix


def _build_from_files(config: DataRankConfig, progress: bool) -> RewardMatrix:
    config.check_data()
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
    """Complete Ω_2 at each rank, with the labels and with shuffled labels.

    If a rank meets shuffled labels too, then meeting the real ones at that rank says nothing about them. The shuffled
    results are None if the matrix does not hold shuffled labels.
    """
    omega2, shuffled = matrix.omega2, matrix.shuffled_omega2
    if not len(omega2):
        return [], []
    ranks = config.rank_numbers or suggest_ranks(matrix)
    for rank in ranks:  # a wrong rank is refused before the work on the others
        check_rank(omega2, rank)
    results = [_complete_labels(config, matrix, rank, device, progress) for rank in ranks]
    if shuffled is None:
        return results, None
    controls = (_solve(config, shuffled, rank, None, device, f"rank {rank}, shuffled", progress) for rank in ranks)
    return results, [_rate(matrix, rank, control, config.eps) for rank, control in zip(ranks, controls, strict=True)]


def _complete_labels(
    config: DataRankConfig, matrix: RewardMatrix, rank: int, device: str, progress: bool
) -> RankResult:
    """Complete Ω_2 at one rank, starting from a saved certificate if there is one, and save the new one."""
    omega2 = matrix.omega2
    file = None if config.certificates is None else config.certificates / f"rank-{rank}.safetensors"
    start = Factors.load(file, omega2) if rank and file is not None and file.exists() else None
    completion = _solve(config, omega2, rank, start, device, f"rank {rank}", progress)
    if file is not None:
        completion.factors.save(file, omega2)
    return _rate(matrix, rank, completion, config.eps)


def _solve(
    config: DataRankConfig,
    observed: Observed,
    rank: int,
    start: Factors | None,
    device: str,
    title: str,
    progress: bool,
) -> Completion:
    """Complete a matrix under a progress bar."""
    with tqdm(desc=title, unit="iteration", disable=not progress, leave=False) as bar:

        def show(mse: float) -> None:
            bar.set_postfix_str(f"MSE {mse:.2e}", refresh=False)
            bar.update()

        return complete(
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


def _rate(matrix: RewardMatrix, rank: int, completion: Completion, eps: float) -> RankResult:
    return RankResult(
        rank=rank,
        mse=completion.mse,
        mse_nm=_mse_over_all(completion.mse, matrix.omega2),
        iterations=completion.iterations,
        seconds=completion.seconds,
        bound=_bound_whole_rank(matrix, rank) if completion.mse <= eps else None,
    )


def _mse_over_all(mse: float, observed: Observed) -> float:
    """Turn a mean over the observed entries into one over all rows and columns, where the unknown ones count as met."""
    n, m = observed.shape
    return mse * len(observed) / (n * m)


def _bound_whole_rank(matrix: RewardMatrix, rank: int) -> int:
    """The rank that the whole matrix needs at most if this rank meets Ω_2."""
    return max(1, rank + rank_outside_omega2(matrix))


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
    mse = factors.mse(omega2)
    return {
        "rank": factors.rank,
        "mse": mse,
        "mse_nm": _mse_over_all(mse, omega2),
        "bound": _bound_whole_rank(matrix, factors.rank),
    }
