"""Low-rank completion: factors A, B of a given rank whose product is near the observed entries of a matrix.

    minimise  ‖P_Ω(X − A Bᵀ)‖² + penalty · (‖A‖² + ‖B‖²)    over A (n × r) and B (m × r)

This is the objective of soft-impute ALS (Hastie et al. 2015), minimised in another way. Soft-impute fills the unknown
entries with its last guess and regresses on all of them, which moves the factors a little in each iteration. Here each
row of A is regressed on the observed entries of its own row, and each row of B on those of its column, so that each
half step is the exact minimum. The start is not a random matrix but one that peeling has already fitted to most
entries.

**Ridge regressions.** A row with k entries has the solution B_kᵀ (B_k B_kᵀ + penalty)⁻¹ x for k ≤ r, a k × k system,
and otherwise (B_kᵀ B_k + penalty)⁻¹ B_kᵀ x, an r × r system. Rows of similar length are solved together. An iteration
costs O(r · min(k, r)) per entry, whatever the size of the matrix.

**Peeling.** In a completion of rank r, a row is a vector of r numbers, and each of its entries is one linear equation
for that vector once the columns are known. So a row or column with at most r entries can be solved after all others.
Peeling takes out all such rows and columns, then those that have at most r entries left, and so on, until nothing
changes. The entries that stay are the core, in which every row and column has more than r entries. If the core is
empty, solving the rounds backwards meets all entries exactly, provided that the equations are independent. They are for
values in general position; for special ones (such as the identity) they need not be.
"""

import hashlib
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from radq.errors import DataError, OptionError, first_line
from radq.files import atomic_file, explained_writing
from radq.numerics import require_memory
from radq.rank.matrix import Observed

NUMBERS_PER_CHUNK = {"cpu": 2**22, "cuda": 2**27}  # gathered factors: as many as fit a cache, and as fill a GPU
NUMBERS_PER_PRODUCT = 2**24  # factors that are multiplied at once to compute an error
ENTRIES_PER_GROUP = 4096  # fewer are not worth a group of their own
NUMBERS_FOR_THREADS = 2**22  # fewer are not worth a second thread


@dataclass(frozen=True)
class Factors:
    """The factors of A Bᵀ, which has rank r at most.

    If A Bᵀ is near the observed entries, A and B are a certificate that a matrix of that rank meets them.
    """

    a: Float[Tensor, "n r"]
    b: Float[Tensor, "m r"]

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    def mse(self, observed: Observed) -> float:
        """Mean squared error over the observed entries, computed in float64 and in chunks."""
        device, squares = self.a.device, 0.0
        step = max(1, NUMBERS_PER_PRODUCT // max(1, self.rank))
        for first in range(0, len(observed), step):
            rows, columns, values = (
                torch.from_numpy(part[first : first + step]).to(device)
                for part in (observed.rows, observed.columns, observed.values)
            )
            products = (self.a[rows].double() * self.b[columns].double()).sum(1)
            squares += float((values - products).square().sum())
        return squares / len(observed)

    def save(self, file: str | Path, observed: Observed) -> None:
        """Write a safetensors file with A, B and a fingerprint of the entries they were fitted to."""
        tensors = {"A": self.a.cpu().contiguous(), "B": self.b.cpu().contiguous()}
        with explained_writing(file), atomic_file(file) as temporary:
            save_file(tensors, temporary, metadata={"matrix": fingerprint_entries(observed)})

    @classmethod
    def load(cls, file: str | Path, observed: Observed) -> "Factors":
        """Read factors; refuse those that were fitted to other entries."""
        try:
            with safe_open(file, "pt") as stored:
                a, b = stored.get_tensor("A"), stored.get_tensor("B")
                matrix = (stored.metadata() or {}).get("matrix")
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{str(file)!r} cannot be read as a certificate: {first_line(error).rstrip('.: ')}.",
                "give a file that `radq rank data --certificates FOLDER` has written.",
            ) from error
        wanted = [(size, *a.shape[1:2]) for size in observed.shape]
        if [tuple(a.shape), tuple(b.shape)] != wanted or matrix != fingerprint_entries(observed):
            raise DataError(
                f"the certificate {str(file)!r} ({tuple(a.shape)} and {tuple(b.shape)}) does not belong to this matrix "
                f"of {observed.shape[0]} × {observed.shape[1]} with {len(observed)} entries.",
                "give the matrix that was saved with it: same data, tokenizer, labels and options.",
            )
        if not all(bool(torch.isfinite(part).all()) for part in (a, b)):
            raise DataError(
                f"the certificate {str(file)!r} holds numbers that are not finite.",
                "delete it and make it again with `radq rank data --certificates FOLDER`.",
            )
        return cls(a, b)


def fingerprint_entries(observed: Observed) -> str:
    """A hash of the shape, places and values of the observed entries."""
    digest = hashlib.sha256(f"{observed.shape}".encode())
    for part in (observed.rows, observed.columns, observed.values):
        digest.update(part.tobytes())
    return digest.hexdigest()


# --- peeling ---


class Peeling(NamedTuple):
    """An order in which rows and columns can be solved: the core first, then the rounds from last to first.

    A round is a side, 0 for rows and 1 for columns, and the entries that rows or columns had left when they were taken
    out together.
    """

    rounds: list[tuple[int, np.ndarray]]  # in the order in which they are taken out
    core: np.ndarray  # entries that cannot be taken out


def peel(observed: Observed, rank: int) -> Peeling:
    """Take out rows and columns with at most `rank` entries left, until none is left to take out."""
    left, rounds, idle, side = np.arange(len(observed)), [], 0, 0
    while len(left) and idle < 2:
        members = observed.sides[side][left]
        leaving = np.bincount(members)[members] <= rank
        idle += 1
        if leaving.any():
            rounds.append((side, left[leaving]))
            left, idle = left[~leaving], 0
        side = 1 - side
    return Peeling(rounds, left)


def degeneracy(observed: Observed) -> int:
    """The smallest rank at which peeling leaves no core: values in general position are met exactly from there on."""
    return bisect_left(range(min(observed.shape)), True, key=lambda rank: not len(peel(observed, rank).core))


# --- completion ---


@dataclass(frozen=True)
class Completion:
    """Factors that `complete` has found, and the cost of finding them."""

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
    """Find factors of at most the given rank that are near the observed entries. Rank 0 is the zero matrix.

    The solver stops after an iteration that lowers the objective by less than the tolerance, unless the target is in
    reach: the error is above it and would fall to it within the remaining iterations at the pace of the last one. The
    penalty is most of the objective by then, so the error may halve while the objective hardly moves.

    It begins with `start`, factors of this or another rank, or else with those that peeling gives. `target` is a mean
    squared error over the observed entries, with which `progress` is called after every iteration.
    """
    n, m = observed.shape
    check_rank(observed, rank)
    began = time.perf_counter()
    if rank == 0:
        zero = Factors(torch.zeros(n, 0, dtype=dtype), torch.zeros(m, 0, dtype=dtype))
        return Completion(zero, zero.mse(observed), 0, time.perf_counter() - began)
    require_memory(4 * (n + m) * rank * dtype.itemsize, device, f"a completion of rank {rank} of a {n} × {m} matrix")
    threads = torch.get_num_threads()
    if len(observed) * rank < NUMBERS_FOR_THREADS:  # faster on one, above all where other work uses the other cores
        torch.set_num_threads(1)
    try:
        alternate = partial(_alternate, penalty=penalty, tolerance=tolerance, progress=progress)
        begin, before = _random_factors(n, m, rank, seed, device, dtype), 0
        if start is None:
            complete_core = partial(alternate, iterations=max(1, iterations - 1), target=0.0)
            begin, before = _fit_by_peeling(observed, begin, penalty, complete_core)
        else:
            begin = Factors(torch.cat([start.a[:, :rank].to(begin.a), begin.a[:, start.rank :]], dim=1), begin.b)
        factors, after = alternate(observed, begin, iterations=max(1, iterations - before), target=target)
    finally:
        torch.set_num_threads(threads)
    return Completion(factors, factors.mse(observed), before + after, time.perf_counter() - began)


def _alternate(
    observed: Observed,
    factors: Factors,
    penalty: float,
    iterations: int,
    tolerance: float,
    target: float,
    progress: Callable[[float], None],
) -> tuple[Factors, int]:
    """Solve for B given A, then for A given B, until little changes; return the factors and the number of iterations.

    The start of B does not matter.
    """
    by_row = group_entries(observed.rows, observed.columns, observed.values, factors.b)
    by_column = group_entries(observed.columns, observed.rows, observed.values, factors.a)
    a, b = factors.a.clone(), factors.b.clone()
    objective, mse, done = float("inf"), float("inf"), 0
    for done in range(1, iterations + 1):
        solve_rows(by_column, a, b, penalty)
        squares = solve_rows(by_row, b, a, penalty)
        last, objective = objective, float(squares + penalty * (a.square().sum() + b.square().sum()))
        last_mse, mse = mse, float(squares) / len(observed)
        progress(mse)
        if not objective < float("inf"):
            raise OptionError(
                f"the completion diverged in {a.dtype}.",
                "use a larger penalty" + ("." if a.dtype == torch.float64 else ", or float64."),
            )
        pace = min(1.0, mse / last_mse) if last_mse else 1.0
        in_reach = mse > target and mse * pace ** (iterations - done) <= target
        if last - objective <= tolerance * objective and not in_reach:
            break
    return Factors(a, b), done


def _fit_by_peeling(
    observed: Observed,
    random: Factors,
    penalty: float,
    complete_core: Callable[[Observed, Factors], tuple[Factors, int]],
) -> tuple[Factors, int]:
    """Complete the core, then solve the rounds of peeling backwards; return the factors and the number of iterations.

    Among the solutions of a row or column, the one nearest to its random start is taken. The one nearest to zero would
    not do: such solutions lie in the span of few vectors, and later equations then have no solution.
    """
    peeling = peel(observed, random.rank)
    a, b, iterated = random.a, random.b, 0
    if len(peeling.core):
        sides = (np.unique(side[peeling.core], return_inverse=True) for side in observed.sides)
        (rows, row_of), (columns, column_of) = sides
        core = Observed(row_of, column_of, observed.values[peeling.core], (len(rows), len(columns)))
        done, iterated = complete_core(core, Factors(a[rows], b[columns]))
        a[rows], b[columns] = done.a, done.b
    for side, entries in reversed(peeling.rounds):
        known, factor = (b, a) if side == 0 else (a, b)
        ends, others = observed.sides[side][entries], observed.sides[1 - side][entries]
        groups = group_entries(ends, others, observed.values[entries], known)
        solve_rows(groups, known, factor, penalty, anchored=True)
    return Factors(a, b), iterated


# --- ridge regressions ---


@dataclass(frozen=True)
class RowGroup:
    """Rows with similar numbers of entries, padded to k: a padded neighbour is a row of zeros after the last factor."""

    rows: Int[Tensor, " b"]
    neighbours: Int[Tensor, "b k"]  # columns of the entries
    values: Float[Tensor, "b k"]


def solve_rows(
    groups: list[RowGroup],
    known: Float[Tensor, "m r"],
    factor: Float[Tensor, "n r"],
    penalty: float,
    anchored: bool = False,
) -> Float[Tensor, ""]:
    """Solve the ridge regression of every row in the groups on the known factor of the columns, in place.

    Returns the sum of the squared residuals. The penalty is on the distance of a row of `factor` to zero, or, with
    `anchored`, to its value before the call.
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
            anchor = factor[rows, :, None] if anchored else None  # (b, r, 1)
            if anchor is not None:  # where values are padding, near is 0, so they stay 0
                values = values - near @ anchor
            x, residuals = _ridge(near, values, penalty)
            factor.index_copy_(0, rows, (x if anchor is None else x + anchor).squeeze(2))
            squares += residuals.square().sum()
    return squares


def _ridge(
    known: Float[Tensor, "b k r"], values: Float[Tensor, "b k 1"], penalty: float
) -> tuple[Float[Tensor, "b r 1"], Float[Tensor, "b k 1"]]:
    """Solutions and residuals of ridge regressions, from the smaller of the two equivalent systems."""
    k, r = known.shape[1:]
    gram = known @ known.mT if k <= r else known.mT @ known
    gram.diagonal(dim1=1, dim2=2).add_(penalty)
    if k <= r:
        dual = values / gram if k == 1 else _solve_definite(gram, values)
        return known.mT @ dual, penalty * dual
    x = _solve_definite(gram, known.mT @ values)
    return x, values - known @ x


def _solve_definite(matrices: Float[Tensor, "b s s"], values: Float[Tensor, "b s 1"]) -> Float[Tensor, "b s 1"]:
    """Solve systems whose matrices are positive definite but for rounding errors.

    Where the penalty is smaller than the rounding errors, a factorisation can fail; such a matrix gets a larger
    diagonal, of the size of the rounding errors.
    """
    roots, failed = torch.linalg.cholesky_ex(matrices)
    if failed.any():
        rounding = matrices.shape[1] * torch.finfo(matrices.dtype).eps
        floors = rounding * matrices.diagonal(dim1=1, dim2=2).sum(1, keepdim=True) * (failed > 0)[:, None]  # (b, 1)
        roots, _ = torch.linalg.cholesky_ex(matrices + torch.diag_embed(floors.expand(-1, matrices.shape[1])))
    return torch.cholesky_solve(values, roots)


def group_entries(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, known: Tensor) -> list[RowGroup]:
    """Group rows by their number of entries, longest first.

    The shortest row of a group has at least two thirds of the entries of the longest, unless the group is small.
    """
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
            RowGroup(
                torch.from_numpy(members[chosen]).to(known.device),
                torch.from_numpy(np.where(inside, columns[where], len(known))).to(known.device),
                torch.from_numpy(np.where(inside, values[where], 0.0)).to(known),
            )
        )
        first += len(chosen)
    return groups


def _random_factors(n: int, m: int, rank: int, seed: int, device: str, dtype: torch.dtype) -> Factors:
    """Random rows of length about 1. The first column of A is 1, so that B can fit the mean of each column at once."""
    generator = torch.Generator(device).manual_seed(seed)
    a, b = (torch.randn(size, rank, generator=generator, dtype=dtype, device=device) / rank**0.5 for size in (n, m))
    a[:, 0] = 1.0
    return Factors(a, b)


def check_rank(observed: Observed, rank: int) -> None:
    n, m = observed.shape
    if not 0 <= rank <= min(n, m):
        raise OptionError(
            f"rank must be at least 0 and at most {min(n, m)} for a matrix of {n} × {m}, got {rank}.",
            "choose a rank in that range.",
        )
