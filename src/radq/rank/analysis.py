"""The question a reward matrix answers: which rank does a model need to fit these responses, or shuffled ones?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from radq.errors import DataError
from radq.rank.completion import Completion, check_rank, complete
from radq.rank.factors import Factors
from radq.rank.matrix import Observed, RewardMatrix
from radq.rank.peeling import degeneracy


@dataclass(frozen=True)
class RankResult:
    """A row of the table."""

    rank: int
    mse: float  # over the entries of Ω_2, as the paper's table
    mse_nm: float  # over all of its rows and columns, as the paper's definition
    iterations: int
    seconds: float
    bound: int | None  # on the minimal ε-rank of the whole matrix, where ε is reached


def describe(matrix: RewardMatrix) -> dict[str, Any]:
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


def suggest_ranks(matrix: RewardMatrix) -> list[int]:
    """From the zero matrix to where general position meets all entries, and twice that."""
    enough = degeneracy(matrix.omega2)
    return sorted({min(rank, *matrix.omega2.shape) for rank in (0, enough // 4, enough // 2, enough, 2 * enough)})


def complete_all(
    matrix: RewardMatrix,
    ranks: Sequence[int],
    eps: float,
    certificates: str | Path | None = None,
    progress: bool = False,
    **options: Any,
) -> Iterator[RankResult]:
    """Complete Ω_2 at each rank, each until ε is reached or out of reach; options are those of `complete`.

    With a folder for certificates, A and B of each rank are saved there as they come, and those that are there already
    are gone on from.
    """
    omega2 = matrix.omega2
    for rank in ranks:  # all of them before the work of one
        check_rank(omega2, rank)
    for rank in ranks:
        file = None if certificates is None else Path(certificates) / f"rank-{rank}.safetensors"
        start = Factors.load(file, omega2) if rank and file is not None and file.exists() else None
        result = _complete(omega2, rank, f"rank {rank}", progress, start=start, target=eps, **options)
        if file is not None:
            result.factors.save(file, omega2)
        yield _judge(matrix, rank, result, eps)


def complete_shuffled(
    matrix: RewardMatrix, ranks: Sequence[int], eps: float, progress: bool = False, **options: Any
) -> Iterator[RankResult]:
    """The same with the responses of other utterances: a rank that meets these too says nothing about the responses."""
    omega2 = matrix.shuffled_omega2
    if omega2 is None:
        raise DataError(
            "the reward matrix does not hold shuffled responses: an earlier version of radq has saved it.",
            "make it anew from the data by --save-matrix.",
        )
    for rank in ranks:
        result = _complete(omega2, rank, f"rank {rank}, shuffled", progress, target=eps, **options)
        yield _judge(matrix, rank, result, eps)


def _complete(omega2: Observed, rank: int, what: str, progress: bool, **options: Any) -> Completion:
    with tqdm(desc=what, unit="iteration", disable=not progress, leave=False) as bar:

        def show(mse: float) -> None:
            bar.set_postfix_str(f"MSE {mse:.2e}", refresh=False)
            bar.update()

        return complete(omega2, rank, progress=show, **options)


def _judge(matrix: RewardMatrix, rank: int, result: Completion, eps: float) -> RankResult:
    n, m = matrix.omega2.shape
    return RankResult(
        rank=rank,
        mse=result.mse,
        mse_nm=result.mse * len(matrix.omega2) / (n * m),
        iterations=result.iterations,
        seconds=result.seconds,
        bound=max(1, rank + rank_beyond_omega2(matrix)) if result.mse <= eps else None,
    )


def rank_beyond_omega2(matrix: RewardMatrix) -> int:
    """Rows with one continuation take one more rank per attribute at most: each attribute's part is a constant row."""
    return len(matrix.attributes) if matrix.prefixes > len(matrix.omega2_rows) else 0


def verify(matrix: RewardMatrix, certificate: str | Path) -> dict[str, Any]:
    """What a certificate is worth, computed from its factors and the matrix alone."""
    omega2 = matrix.omega2
    if not len(omega2):
        raise DataError(
            "the matrix has no prefix with two continuations.", "there is nothing to certify: rank 1 meets it."
        )
    factors = Factors.load(certificate, omega2)
    mse = factors.mse(omega2)
    return {
        "rank": factors.rank,
        "mse": mse,
        "mse_nm": mse * len(omega2) / (omega2.shape[0] * omega2.shape[1]),
        "bound": max(1, factors.rank + rank_beyond_omega2(matrix)),
    }
