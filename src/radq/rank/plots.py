"""Pictures of numerical ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radq.errors import require_package
from radq.rank.numerical import NumericalRank


def plot_ranks(curves: Mapping[str, list[NumericalRank]], hidden_size: int, file: Path) -> None:
    """Rank against the number of prefixes, with the line at d that no RAD-Q crosses."""
    figure, axes = _axes()
    for label, ranks in curves.items():
        axes.plot([rank.num_rows for rank in ranks], [rank.rank for rank in ranks], marker="o", label=label)
    axes.axhline(hidden_size, color="grey", linestyle="--", label=f"d = {hidden_size}")
    axes.set_xlabel("prefixes (rows)")
    axes.set_ylabel("numerical rank")
    axes.set_xscale("log", base=2)
    axes.legend()
    figure.savefig(file, dpi=150)


def plot_spectrum(spectra: Mapping[str, NumericalRank], hidden_size: int, file: Path) -> None:
    """Singular values over the largest, with the cutoff."""
    figure, axes = _axes()
    for label, rank in spectra.items():
        largest = rank.spectrum[0] or 1.0
        (line,) = axes.plot(range(1, len(rank.spectrum) + 1), [value / largest for value in rank.spectrum], label=label)
        axes.axhline(rank.cutoff / largest, color=line.get_color(), linestyle=":", label=f"cutoff, {label}")
    axes.axvline(hidden_size, color="grey", linestyle="--", label=f"d = {hidden_size}")
    axes.set_xlabel("singular value")
    axes.set_ylabel("σ / σ_1")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend()
    figure.savefig(file, dpi=150)


def _axes() -> tuple[Any, Any]:
    figure = require_package("matplotlib.figure", "eval").Figure(
        figsize=(6, 4), layout="constrained"
    )  # nothing global, no display
    return figure, figure.subplots()
