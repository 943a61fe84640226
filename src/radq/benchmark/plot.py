"""The plot of a benchmark: ratios to decoding without a guide above, milliseconds per token below."""

from typing import Any, Literal

from radq.benchmark.config import UNGUIDED
from radq.benchmark.guides import GUIDES
from radq.benchmark.measure import BenchResult, Timing
from radq.errors import require_package
from radq.report.plots import COLOURS, INK, MARKERS, PANEL_HEIGHT, WIDTH, Plot, add_legend, drawing, render

Axis = Literal["top_k", "rows", "prompt_tokens"]
AXES: dict[Axis, str] = {"top_k": "candidates k", "rows": "rows", "prompt_tokens": "tokens of the prompt"}


def plot_bench(result: BenchResult) -> Plot:
    """Plot times over candidates, rows and prompts, a column for each of them that has several values."""
    axes: list[Axis] = [axis for axis in AXES if len({getattr(timing, axis) for timing in result.timings}) > 1]
    axes = axes or ["top_k"]
    with drawing("bench") as figure:
        panels = figure.subplots(2, len(axes), squeeze=False, sharey="row", sharex="col")
        drawn: dict[str, Any] = {}  # lines by label, for the legend
        for column, axis in enumerate(axes):
            for row, measure in enumerate(("ratio", "milliseconds")):
                drawn |= _draw_panel(panels[row, column], result, axis, measure)
            panels[1, column].set_xlabel(AXES[axis])
            panels[0, column].set_title(_describe_reference(result, axis), loc="left")
        panels[0, 0].set_ylabel("times unguided")
        panels[1, 0].set_ylabel("ms per token")
        width = max(5.5, WIDTH * len(axes) / 3)
        figure.set_size_inches(width, 1.6 * PANEL_HEIGHT + add_legend(figure, drawn, width))
        return render(figure, "bench", f"Time per token of {result.lm} on {result.machine}")


def _draw_panel(axes: Any, result: BenchResult, axis: Axis, measure: str) -> dict[str, Any]:
    """Draw a line for each guide, over the points at which only this axis differs from the reference."""
    drawn = {}
    others = [other for other in AXES if other != axis]
    here = [one for one in result.timings if all(getattr(one, o) == getattr(result.timings[0], o) for o in others)]
    for guide, captured in dict.fromkeys((one.guide, one.captured) for one in here):
        line = [one for one in here if (one.guide, one.captured) == (guide, captured)]
        points = sorted((_place(one, axis, result.vocab_size), getattr(one, measure).median) for one in line)
        label = GUIDES[guide].title + (", captured" if captured else "")
        solid = captured or not any(one.captured for one in here)
        (drawn[label],) = axes.plot(*zip(*points, strict=True), **_look(guide, solid))
    _scale_axes(axes, sorted({_place(one, axis, result.vocab_size) for one in here}))
    return drawn


def _scale_axes(axes: Any, places: list[int]) -> None:
    """Make both axes logarithmic, with a number at each place that was measured."""
    ticker = require_package("matplotlib.ticker", "report")
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(ticker.FixedLocator(places))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    for scale in (axes.xaxis, axes.yaxis):
        scale.set_major_formatter(ticker.FormatStrFormatter("%g"))


def _place(timing: Timing, axis: Axis, vocab_size: int) -> int:
    return getattr(timing, axis) or vocab_size


def _look(guide: str, solid: bool) -> dict[str, Any]:
    """Choose colour and marker by the guide; naive ways have hollow markers."""
    line = {"ls": "-" if solid else "--", "lw": 1.5, "ms": 5}
    if guide == UNGUIDED:
        return line | {"color": INK, "marker": "."}
    number = [name for name in GUIDES if not name.startswith("naive")].index(guide.removeprefix("naive-")) - 1
    hollow = {"mfc": "none", "alpha": 0.7} if guide.startswith("naive") else {}
    return line | {"color": COLOURS[number], "marker": MARKERS[number]} | hollow


def _describe_reference(result: BenchResult, axis: Axis) -> str:
    """The values of the other axes."""
    reference = result.timings[0]
    parts = {
        "top_k": "whole vocabulary" if reference.top_k is None else f"k = {reference.top_k}",
        "rows": f"{reference.rows} rows" if reference.rows > 1 else "1 row",
        "prompt_tokens": f"prompt of {reference.prompt_tokens}",
    }
    return ", ".join(text for name, text in parts.items() if name != axis)
