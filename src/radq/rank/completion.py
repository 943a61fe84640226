"""Low-rank completion: factors A, B of a given rank whose product meets the observed entries.

    minimise  ‖P_Ω(X − A Bᵀ)‖² + penalty · (‖A‖² + ‖B‖²)    over A (n × r) and B (m × r)

This is the objective of soft-impute ALS (Hastie et al. 2015), solved in another way. Soft-impute fills the unknown
entries with its last guess and regresses on all of them: many small steps. Here each row of A is regressed on the
entries of its own row, and likewise B, so that each half step is the exact minimum. And the start is no random matrix
but one that peeling has made meet most entries already (see `radq.rank.peeling`).

A row with k entries has the ridge solution B_kᵀ (B_k B_kᵀ + penalty)⁻¹ x for k ≤ r, a k × k system, and otherwise
(B_kᵀ B_k + penalty)⁻¹ B_kᵀ x, an r × r system. Rows of similar length are solved together. An iteration costs
O(r · min(k, r)) per entry, whatever the size of the matrix.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from radq.errors import OptionError
from radq.numerics import require_memory
from radq.rank.factors import Factors
from radq.rank.matrix import Observed
from radq.rank.peeling import peel

NUMBERS_PER_CHUNK = {"cpu": 2**22, "cuda": 2**27}  # gathered factors: what fits a cache, and what fills a GPU
ENTRIES_PER_GROUP = 4096  # fewer are not worth a group of their own
NUMBERS_FOR_THREADS = 2**22  # fewer are not worth a second thread


@dataclass(frozen=True)
class Group:
    """Rows of similar length. Where one is shorter, its neighbours are the row of zeros after the last factor."""

    rows: Int[Tensor, " b"]
    neighbours: Int[Tensor, "b k"]  # columns of the entries
    values: Float[Tensor, "b k"]


@dataclass(frozen=True)
class Completion:
    factors: Factors
    mse: float  # over the observed entries
    iterations: int
    seconds: float


def complete(
    observed: Observed,
    rank: int,
    penalty: float = 1e-4,
    iterations: int = 200,
    tolerance: float = 0.01,
    target: float = 1e-6,
    start: Factors | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    progress: Callable[[float], None] = lambda mse: None,
) -> Completion:
    """Factors of at most the given rank. Rank 0 is the zero matrix.

    Args:
        tolerance: stop when an iteration lowers the objective by less than this share of it, but not
        target: where the mean squared error is above this number and would still come down to it, at the pace of the
            last iteration, in the iterations that are left. The penalty is most of the objective by then, so the error
            may halve while the objective hardly moves.
        start: factors to go on from, of this or another rank; by default those that peeling gives.
        progress: called after every iteration with its mean squared error.
    """
    n, m = observed.shape
    check_options(penalty, iterations, tolerance, seed)
    check_rank(observed, rank)
    began = time.perf_counter()
    if rank == 0:
        zero = Factors(torch.zeros(n, 0, dtype=dtype), torch.zeros(m, 0, dtype=dtype))
        return Completion(zero, zero.mse(observed), 0, time.perf_counter() - began)
    require_memory(4 * (n + m) * rank * dtype.itemsize, device, f"a completion of rank {rank} of a {n} × {m} matrix")
    with _threads(1 if len(observed) * rank < NUMBERS_FOR_THREADS else torch.get_num_threads()):
        random = _random_factors(n, m, rank, seed, device, dtype)
        before = 0
        if start is None:
            begin, before = _eliminate(observed, random, penalty, iterations, tolerance, progress)
        else:
            begin = Factors(torch.cat([start.a[:, :rank].to(random.a), random.a[:, start.rank :]], dim=1), random.b)
        left = max(1, iterations - before)
        factors, after = _alternate(observed, begin, penalty, left, tolerance, target, progress)
    return Completion(factors, factors.mse(observed), before + after, time.perf_counter() - began)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Small steps run faster on one thread, and much faster where other work has the second core."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _alternate(
    observed: Observed,
    factors: Factors,
    penalty: float,
    iterations: int,
    tolerance: float,
    target: float,
    progress: Callable[[float], None],
) -> tuple[Factors, int]:
    """Solve for B, then for A, until little changes; and how often. B's start does not matter."""
    by_row = group_entries(observed.rows, observed.columns, observed.values, factors.b)
    by_column = group_entries(observed.columns, observed.rows, observed.values, factors.a)
    a, b = factors.a.clone(), factors.b.clone()
    objective, mse, done = float("inf"), float("inf"), 0
    while True:
        solve(by_column, a, b, penalty)
        squares = solve(by_row, b, a, penalty)
        done += 1
        last, objective = objective, float(squares + penalty * (a.square().sum() + b.square().sum()))
        last_mse, mse = mse, float(squares) / len(observed)
        progress(mse)
        if not objective < float("inf"):
            raise OptionError(
                f"the completion diverged in {a.dtype}.",
                "use a larger penalty" + ("." if a.dtype == torch.float64 else ", or float64."),
            )
        if done == iterations:
            return Factors(a, b), done
        pace = min(1.0, mse / last_mse) if last_mse else 1.0
        in_reach = mse > target and mse * pace ** (iterations - done) <= target
        if last - objective <= tolerance * objective and not in_reach:
            return Factors(a, b), done


def _eliminate(
    observed: Observed,
    random: Factors,
    penalty: float,
    iterations: int,
    tolerance: float,
    progress: Callable[[float], None],
) -> tuple[Factors, int]:
    """Complete the core, then all that was peeled off it, each row and column as near to its random start as it may.

    The random part matters: solutions nearest to zero lie in the span of few vectors, and later equations then find no
    solution.
    """
    peeling = peel(observed, random.rank)
    a, b, iterated = random.a, random.b, 0
    if len(peeling.core):
        rows, columns = np.unique(observed.rows[peeling.core]), np.unique(observed.columns[peeling.core])
        core, begin = observed.restrict(peeling.core), Factors(a[rows], b[columns])
        done, iterated = _alternate(core, begin, penalty, max(1, iterations - 1), tolerance, 0.0, progress)
        a[rows], b[columns] = done.a, done.b
    for part in reversed(peeling.rounds):
        ends = (observed.rows, observed.columns) if part.of_rows else (observed.columns, observed.rows)
        target, known = (a, b) if part.of_rows else (b, a)
        groups = group_entries(ends[0][part.entries], ends[1][part.entries], observed.values[part.entries], known)
        solve(groups, known, target, penalty, anchored=True)
    return Factors(a, b), iterated


def solve(
    groups: list[Group],
    known: Float[Tensor, "m r"],
    target: Float[Tensor, "n r"],
    penalty: float,
    anchored: bool = False,
) -> Float[Tensor, ""]:
    """Set the factor of every row in the groups to the best given those of the columns; returns the squared residuals.

    Anchored, the penalty is on the distance to where the target was, otherwise on the distance to zero.
    """
    r = known.shape[1]
    padded = F.pad(known, (0, 0, 0, 1))
    squares = known.new_zeros(())
    for group in groups:
        k = group.neighbours.shape[1]
        rows_per_chunk = max(1, NUMBERS_PER_CHUNK["cuda" if known.is_cuda else "cpu"] // (k * r + min(k, r) ** 2))
        for first in range(0, len(group.rows), rows_per_chunk):
            part = slice(first, first + rows_per_chunk)
            rows, values = group.rows[part], group.values[part, :, None]
            near = F.embedding(group.neighbours[part], padded)  # (b, k, r)
            anchor = target[rows, :, None] if anchored else None  # (b, r, 1)
            if anchor is not None:  # near is 0 where values are padding, and so is what is left of them
                values = values - near @ anchor
            x, residuals = _ridge(near, values, penalty)
            target.index_copy_(0, rows, (x if anchor is None else x + anchor).squeeze(2))
            squares += residuals.square().sum()
    return squares


def _ridge(
    known: Float[Tensor, "b k r"], values: Float[Tensor, "b k 1"], penalty: float
) -> tuple[Float[Tensor, "b r 1"], Float[Tensor, "b k 1"]]:
    """Solutions and residuals, by whichever system is smaller."""
    k, r = known.shape[1:]
    gram = known @ known.mT if k <= r else known.mT @ known
    gram.diagonal(dim1=1, dim2=2).add_(penalty)
    if k <= r:
        dual = values / gram if k == 1 else _solve_definite(gram, values)
        return known.mT @ dual, penalty * dual
    x = _solve_definite(gram, known.mT @ values)
    return x, values - known @ x


def _solve_definite(matrices: Float[Tensor, "b s s"], values: Float[Tensor, "b s 1"]) -> Float[Tensor, "b s 1"]:
    """A penalty below the rounding errors of a matrix leaves it indefinite; it then gets one as large as they are."""
    roots, failed = torch.linalg.cholesky_ex(matrices)
    if failed.any():
        rounding = matrices.shape[1] * torch.finfo(matrices.dtype).eps
        floors = rounding * matrices.diagonal(dim1=1, dim2=2).sum(1, keepdim=True) * (failed > 0)[:, None]  # (b, 1)
        roots, _ = torch.linalg.cholesky_ex(matrices + torch.diag_embed(floors.expand(-1, matrices.shape[1])))
    return torch.cholesky_solve(values, roots)


def group_entries(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, known: Tensor) -> list[Group]:
    """Rows by length, longest first; in a group the shortest has two thirds of the longest, or the group is small."""
    order = np.argsort(rows, kind="stable")
    members, sizes = np.unique(rows, return_counts=True)
    starts = np.cumsum(sizes) - sizes
    by_size = np.argsort(-sizes, kind="stable")
    groups, first = [], 0
    while first < len(members):
        k = int(sizes[by_size[first]])
        similar = int(np.searchsorted(-sizes[by_size], -(2 * k) // 3, side="right"))
        chosen = by_size[first : max(similar, first + 1 + ENTRIES_PER_GROUP // k)]
        inside = np.arange(k) < sizes[chosen, None]  # (b, k)
        where = order[np.where(inside, starts[chosen, None] + np.arange(k), 0)]
        groups.append(
            Group(
                torch.from_numpy(members[chosen]).to(known.device),
                torch.from_numpy(np.where(inside, columns[where], len(known))).to(known.device),
                torch.from_numpy(np.where(inside, values[where], 0.0)).to(known),
            )
        )
        first += len(chosen)
    return groups


def _random_factors(n: int, m: int, rank: int, seed: int, device: str, dtype: torch.dtype) -> Factors:
    """Rows of length about 1. The first number of A's is 1: the mean of a column is then a first guess, not luck."""
    generator = torch.Generator(device).manual_seed(seed)
    a, b = (torch.randn(size, rank, generator=generator, dtype=dtype, device=device) / rank**0.5 for size in (n, m))
    a[:, 0] = 1.0
    return Factors(a, b)


def check_options(penalty: float, iterations: int, tolerance: float, seed: int) -> None:
    if not 0 < penalty < float("inf"):
        raise OptionError(f"the penalty is {penalty}.", "give a positive number, 1e-4 say.")
    if not 1 <= iterations < 2**31:
        raise OptionError(f"iterations is {iterations}.", "give 1 or more, 200 say.")
    if not 0 <= tolerance < float("inf"):
        raise OptionError(f"the tolerance is {tolerance}.", "give 0 or a positive number, 0.01 say.")
    check_seed(seed)


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise OptionError(f"the seed is {seed}.", "give 0 to 2⁶³ − 1.")


def check_rank(observed: Observed, rank: int) -> None:
    n, m = observed.shape
    if not 0 <= rank <= min(n, m):
        raise OptionError(f"the rank is {rank}, but the matrix is {n} × {m}.", f"give 0 to {min(n, m)}.")
