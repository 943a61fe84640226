"""Low-rank completion compared with soft-impute ALS, the solver of the paper, on the same objective.

    python benchmarks/completion.py                                # a random matrix
    python benchmarks/completion.py --matrix sst2.npz --rank 127   # a file of `radq rank data --save-matrix`
    python benchmarks/completion.py --matrix jigsaw.npz --rank 767 --soft-impute 0 --devices cpu cuda

Prints the error and the seconds of both solvers, and the ratios between devices.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import tyro

from radq.rank.completion import Completion, complete
from radq.rank.matrix import Observed, RewardMatrix


@dataclass
class Arguments:
    matrix: Path | None = None
    """File with a reward matrix; by default a random matrix with 4,000 rows."""
    rank: int = 31
    """Rank of the completion."""
    penalty: float = 1e-4
    """Weight of the squared factors in the objective."""
    soft_impute: int = 100
    """Iterations of soft-impute; 0 to leave it out."""
    devices: list[str] = field(default_factory=lambda: ["cpu"])
    """Devices to run on; the others are compared with the first."""
    threads: int = 2
    """Number of CPU threads."""
    repeats: int = 3
    """Runs per device; the fastest counts, since the first one loads libraries."""


def make_random_matrix(rows: int = 4000, columns: int = 3000) -> Observed:
    """A matrix with few long rows and many short ones, few common tokens and many rare ones; values are 0 or 1."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(2 + rng.pareto(1.0, rows) * 2, columns / 4).astype(int)
    row_of = np.repeat(np.arange(rows), lengths)
    column_of = np.minimum(rng.pareto(0.8, lengths.sum()) * 8, columns - 1).astype(int)
    dense = np.full((rows, columns), np.nan)
    dense[row_of, column_of] = rng.integers(0, 2, len(row_of))
    known = ~np.isnan(dense)
    return Observed.of(dense[np.ix_(known.any(1), known.any(0))])


def soft_impute(observed: Observed, rank: int, penalty: float, iterations: int) -> tuple[float, float]:
    """Mean squared error and seconds of algorithm 5.1 of Hastie et al. in float64, as in the R package softImpute."""
    n, m = observed.shape
    rows, columns, values = (torch.from_numpy(p) for p in (observed.rows, observed.columns, observed.values))
    by_column = torch.argsort(columns, stable=True)
    row_ends, column_ends = (
        torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(index, minlength=size).cumsum(0)])
        for index, size in ((rows, n), (columns, m))
    )
    began = time.perf_counter()
    u = torch.linalg.qr(torch.randn(n, rank, dtype=torch.float64)).Q
    v, d = torch.zeros(m, rank, dtype=torch.float64), torch.ones(rank, dtype=torch.float64)
    residuals = values

    def rotate(product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Left singular vectors, singular values and right singular vectors, from the small Gram matrix."""
        squares, right = torch.linalg.eigh(product.T @ product)
        d = squares.clamp(min=1e-30).sqrt()
        return product @ right / d, d, right

    for _ in range(iterations):
        sparse = torch.sparse_csr_tensor(column_ends, rows[by_column], residuals[by_column], (m, n))
        v, d, right = rotate((sparse @ u + v * d) * (d / (d + penalty)))
        u = u @ right
        residuals = values - ((u * d)[rows] * v[columns]).sum(1)
        sparse = torch.sparse_csr_tensor(row_ends, columns, residuals, (n, m))
        u, d, right = rotate((sparse @ v + u * d) * (d / (d + penalty)))
        v = v @ right
        residuals = values - ((u * d)[rows] * v[columns]).sum(1)
    return float(residuals.square().mean()), time.perf_counter() - began


def main(arguments: Arguments) -> None:
    torch.set_num_threads(arguments.threads)
    observed = make_random_matrix() if arguments.matrix is None else RewardMatrix.load(arguments.matrix).omega2
    print(f"{observed.shape[0]} × {observed.shape[1]}, {len(observed)} entries, rank {arguments.rank}")
    fastest: dict[str, Completion] = {}
    for device in arguments.devices:
        runs = [complete(observed, arguments.rank, arguments.penalty, device=device) for _ in range(arguments.repeats)]
        best = fastest[device] = min(runs, key=lambda run: run.seconds)
        ratio = fastest[arguments.devices[0]].seconds / best.seconds
        print(
            f"radq on {device}: MSE {best.mse:.3g}, {best.iterations} iterations, {best.seconds:.2f} s "
            f"(first run {runs[0].seconds:.2f} s); {ratio:.1f}× as fast as {arguments.devices[0]}"
        )
    if arguments.soft_impute:
        ours = fastest[arguments.devices[0]]
        mse, taken = soft_impute(observed, arguments.rank, arguments.penalty, arguments.soft_impute)
        print(
            f"soft-impute on cpu: MSE {mse:.3g}, {arguments.soft_impute} iterations, {taken:.2f} s; "
            f"radq is {taken / ours.seconds:.1f}× as fast, its error {mse / ours.mse:.3g}× smaller"
        )


if __name__ == "__main__":
    main(tyro.cli(Arguments))
