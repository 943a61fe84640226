"""The question a reward matrix answers: which rank does a model need to fit these responses?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from radq.errors import DataError
from radq.rank.completion import check_rank, complete
from radq.rank.factors import Factors
from radq.rank.matrix import RewardMatrix
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
    """Complete Ω_2 at each rank; options are those of `complete`.

    With a folder for certificates, A and B of each rank are saved there as they come, and those that are there already
    are gone on from.
    """
    omega2 = matrix.omega2
    n, m = omega2.shape
    for rank in ranks:  # all of them before the work of one
        check_rank(omega2, rank)
    beyond = int(matrix.prefixes > n)  # rows with one entry take one more rank
    for rank in ranks:
        file = None if certificates is None else Path(certificates) / f"rank-{rank}.safetensors"
        start = Factors.load(file, omega2) if rank and file is not None and file.exists() else None
        with tqdm(desc=f"rank {rank}", unit="iteration", disable=not progress, leave=False) as bar:

            def show(mse: float, bar: Any = bar) -> None:
                bar.set_postfix_str(f"MSE {mse:.2e}", refresh=False)
                bar.update()

            result = complete(omega2, rank, start=start, progress=show, **options)
        if file is not None:
            result.factors.save(file, omega2)
        reached = result.mse <= eps
        yield RankResult(
            rank=rank,
            mse=result.mse,
            mse_nm=result.mse * len(omega2) / (n * m),
            iterations=result.iterations,
            seconds=result.seconds,
            bound=max(1, rank + beyond) if reached else None,
        )


def give_verdict(
    matrix: RewardMatrix, results: Sequence[RankResult], eps: float, backbone: str | None, hidden_size: int | None
) -> str:
    """One sentence: the smallest rank tried that reaches ε, and what it means for the backbone."""
    if not len(matrix.omega2):
        return "No prefix has two continuations, so a matrix of rank 1 meets every entry: any backbone has the rank."
    reached = min((result for result in results if result.bound is not None), key=lambda r: r.rank, default=None)
    if reached is None:
        best = min(results, key=lambda result: result.mse)
        return (
            f"No rank tried reaches {eps:g} over Ω_2; the best was rank {best.rank} with {best.mse:.2g}. Try higher "
            f"ranks (values in general position are met from rank {degeneracy(matrix.omega2)} on) or prefer RAD-V."
        )
    found = (
        f"Rank {reached.rank} meets the responses with an error of {reached.mse:.2g} ≤ {eps:g} over Ω_2, so the data "
        f"need rank {reached.bound} at most"
    )
    assert reached.bound is not None
    if hidden_size is None:
        return f"{found}: for RAD-Q, any backbone with a hidden size of {reached.bound} or more has it."
    if reached.bound <= hidden_size:
        return f"{found}, which RAD-Q over {backbone} has: its hidden size is {hidden_size}."
    return (
        f"{found}, more than the hidden size {hidden_size} of {backbone} gives RAD-Q: try lower ranks, a wider "
        "backbone, or RAD-V."
    )


def verify(matrix: RewardMatrix, certificate: str | Path) -> dict[str, Any]:
    """What a certificate is worth, computed from its factors and the matrix alone."""
    omega2 = matrix.omega2
    factors = Factors.load(certificate, omega2)
    if not all(bool(torch.isfinite(part).all()) for part in (factors.a, factors.b)):
        raise DataError(f"the certificate {str(certificate)!r} is not finite.", "make it anew.")
    mse = factors.mse(omega2)
    beyond = int(matrix.prefixes > omega2.shape[0])
    return {
        "rank": factors.rank,
        "mse": mse,
        "mse_nm": mse * len(omega2) / (omega2.shape[0] * omega2.shape[1]),
        "bound": factors.rank + beyond,
    }
