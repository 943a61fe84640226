"""The plot of a calibration: the judge's metric and the perplexity over β or the KL budget, with the safe zone."""

from typing import Any

from radq.errors import require_package
from radq.models.calibration import NAMED, Calibration, Interval, MeasuredPoint
from radq.report.plots import COLOURS, INK, PANEL_HEIGHT, Plot, make_figure, plot_style, render

ZONE = {"color": COLOURS[2], "alpha": 0.15, "lw": 0}


def plot_calibration(found: Calibration) -> Plot:
    """Plot what was measured with intervals, the bound of the perplexity, and the strengths by name."""
    with plot_style("calibration"):
        figure = make_figure()
        above, below = figure.subplots(2, 1, sharex=True)
        _draw(above, found, [one.score for one in found.measured], COLOURS[0], "o")
        _draw(below, found, [one.perplexity_ratio for one in found.measured], COLOURS[1], "s")
        below.axhline(found.max_perplexity_ratio, color=INK, lw=1, ls="--")
        above.set_ylabel(found.metric)
        below.set_ylabel("perplexity, × unguided")
        below.set_xlabel("KL budget, nats per token" if found.by == "kl" else "β")
        above.set_title(f"{found.attribute} over {found.base}, by {found.judge}", loc="left")
        _name_strengths(above, found)
        figure.set_size_inches(6.4, 1.7 * PANEL_HEIGHT)
        return render(figure, "calibration", f"Strengths of {found.attribute} over {found.base}")


def _place(found: Calibration, beta: float, budget: float | None) -> float:
    if found.by == "beta":
        return beta
    return 0.0 if beta == 0 or budget is None else budget


def _draw(axes: Any, found: Calibration, values: list[Interval], colour: str, marker: str) -> None:
    """Draw values with their intervals over the safe zone."""
    points: list[tuple[MeasuredPoint, Interval]] = list(zip(found.measured, values, strict=True))
    places = [_place(found, one.beta, one.kl_budget) for one, _ in points]
    middle, low, high = zip(*values, strict=True)
    bars = [[m - a for m, a in zip(middle, low, strict=True)], [b - m for m, b in zip(middle, high, strict=True)]]
    end = found.at(1.0)
    axes.axvspan(0, _place(found, end.beta, end.kl_budget), **ZONE)
    axes.errorbar(places, middle, yerr=bars, color=colour, marker=marker, ms=5, lw=1.5, capsize=3)


def _name_strengths(axes: Any, found: Calibration) -> None:
    """Write the named strengths above the plot, at their places."""
    transforms = require_package("matplotlib.transforms", "report")
    blended = transforms.blended_transform_factory(axes.transData, axes.transAxes)
    for name, strength in NAMED.items():
        setting = found.at(strength)
        place = _place(found, setting.beta, setting.kl_budget)
        axes.axvline(place, color=COLOURS[2], lw=1, ls=":")
        axes.text(place, 0.03, f" {name}", transform=blended, rotation=90, va="bottom", ha="right", color=INK)
