"""Plots of attributes against fluency with one curve per guide, and of pairs of guides at equal perplexity.

    plot = plot_tradeoff("tradeoff-all", "all", results, find_published)   # results of one class of prompts
    plot.svg, plot.png, plot.inline                                        # files, and a drawing for a page

Guides differ in colour and marker, settings in the line; dashed lines are the paper's. Text stays text in the SVG.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from math import isfinite
from typing import Any

import numpy as np
from jaxtyping import Float

from radq.errors import require_package
from radq.evaluation.metrics import ATTRIBUTE_METRICS, FLUENCY_METRICS, METRICS, Estimate
from radq.report.curves import Curve, find_curves
from radq.report.published import PublishedCurve
from radq.report.results import GuideDifference, Result, metric_and_judge, unique
from radq.report.summary import is_trusted, name_group

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)  # Okabe and Ito's palette for colour-blind readers
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # with 6 colours, pairs repeat after 42 guides
LINES: tuple[Any, ...] = ("-", ":", "-.", (0, (1, 3)), (0, (5, 1, 1, 1, 1, 1)))
GREYS = ("#6e7781", "#8c959f", "#57606a")
INK = "#1f2329"  # inside a page it is replaced by the colour of the text
THEMES = (
    f"svg{{color:{INK};background:#fff}}@media(prefers-color-scheme:dark){{svg{{color:#e6edf3;background:#0d1117}}}}"
)
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar in a name is no formula
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#8c959f",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "savefig.dpi": 160,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
WIDTH, PANEL_HEIGHT, LEGEND_ROW = 9.8, 3.4, 0.2  # inches
LEGEND_CHARACTERS = 140  # the most characters in a row of a legend
CORNERS = (
    (4, 4, "left"),
    (4, -10, "left"),
    (-4, -10, "right"),
    (-4, 4, "right"),
)  # offsets of the β that is written beside a point

Published = Callable[[str, str], list[PublishedCurve]]  # finds the paper's curves of an attribute against a fluency


@dataclass(frozen=True)
class Plot:
    """A drawing as SVG and PNG."""

    name: str
    title: str
    svg: str
    png: bytes

    @property
    def inline(self) -> str:
        """The SVG for a page with other drawings: with unique ids, in the page's text colour, without declarations."""

        def adapt(tag: re.Match[str]) -> str:
            plain = re.sub(r' xmlns(:\w+)?="[^"]*"', "", tag[0].replace(INK, "currentColor"))
            return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", plain)

        # Only tags are changed: names in the text are left as they are.
        drawing = re.sub(r"<[^<>]*>", adapt, self.svg[self.svg.index("<svg") :])
        return drawing.replace("<svg", f'<svg role="img" aria-label="{escape(self.title)}"', 1)

    @property
    def themed(self) -> str:
        """The SVG as a file of its own, whose colours follow the reader's light or dark mode."""
        drawing = re.sub(r"<[^<>]*>", lambda tag: tag[0].replace(INK, "currentColor"), self.svg)
        return re.sub(r"(<svg[^<>]*>)", rf"\g<1><style>{THEMES}</style>", drawing, count=1)


# --- attribute against fluency ---


def plot_tradeoff(name: str, group: str, results: Sequence[Result], published: Published) -> Plot | None:
    """Plot every attribute of a class of prompts against perplexity and MAUVE; None where there is nothing to draw."""
    keys = unique(key for result in results for key in result.metrics if _is_measured(key, results))
    rows = sorted((key for key in keys if metric_and_judge(key)[0] in ATTRIBUTE_METRICS), key=_order)
    columns = sorted((key for key in keys if metric_and_judge(key)[0] in FLUENCY_METRICS), key=_order)
    if not rows or not columns:
        return None
    curves = find_curves(results)
    with plot_style(name):
        figure = make_figure()
        panels = figure.subplots(len(rows), len(columns), squeeze=False, sharey="row")
        drawn: dict[str, Any] = {}  # lines by label, for the legend
        for row, attribute in enumerate(rows):
            for column, fluency in enumerate(columns):
                drawn |= _draw_panel(panels[row, column], curves, fluency, attribute, published(attribute, fluency))
            metric, judge = metric_and_judge(attribute)
            panels[row, 0].set_ylabel(f"{metric}: {METRICS[metric].axis}")
            panels[row, 0].set_title(_middle_cut(attribute, 100) if judge else "", loc="left")
        height = _add_legends(figure, curves, drawn)
        figure.set_size_inches(WIDTH, PANEL_HEIGHT * len(rows) + height)
        return render(figure, name, f"Trade-off of {', '.join(unique(c.guide for c in curves))} on {name_group(group)}")


def plot_by_candidates(name: str, title: str, results: Sequence[Result], attribute: str) -> Plot | None:
    """Plot an attribute against perplexity, a panel per choice of candidates; None where there is nothing to draw."""
    if not (_is_measured(attribute, results) and _is_measured("perplexity", results)):
        return None
    curves = find_curves(results)
    settings = unique(curve.setting for curve in curves)
    with plot_style(name):
        figure = make_figure()
        panels = figure.subplots(1, len(settings), squeeze=False, sharey=True)[0]
        drawn: dict[str, Any] = {}
        for axes, setting in zip(panels, settings, strict=True):
            here = [
                replace(curve, setting="", steps=curve.steps if curve.setting == setting else []) for curve in curves
            ]
            drawn |= _draw_panel(axes, here, "perplexity", attribute, [])
            axes.set_title(setting, loc="left")
        metric, judge = metric_and_judge(attribute)
        panels[0].set_ylabel(_axis_label(metric, judge))
        height = _add_legends(figure, [replace(curve, setting="") for curve in curves], drawn)
        figure.set_size_inches(WIDTH, PANEL_HEIGHT + height)
        return render(figure, name, title)


def _is_measured(key: str, results: Sequence[Result]) -> bool:
    return any(isfinite(result.metrics[key].value) for result in results if key in result.metrics)


def _order(key: str) -> tuple[int, str]:
    metric, judge = metric_and_judge(key)
    return list(METRICS).index(metric), judge


def _draw_panel(
    axes: Any, curves: list[Curve], fluency: str, attribute: str, published: list[PublishedCurve]
) -> dict[str, Any]:
    """Draw all curves that have points here; return their lines by label."""
    drawn: dict[str, Any] = {}
    for number, curve in enumerate(published):
        _, x, y = np.array(curve.points).T
        grey, marker = GREYS[number % len(GREYS)], MARKERS[number % len(MARKERS)]
        style = {"color": grey, "marker": marker, "ls": "--", "lw": 1, "ms": 4, "mfc": "none", "alpha": 0.9}
        (drawn[curve.label],) = axes.plot(x, y, **style, zorder=1)
        for end in (0, -1):
            _write_at(axes, f"{curve.points[end][0]:g}", x[end], y[end], grey, corner=1)
    for curve in curves:
        points = [(step.label, step.estimate(fluency), step.estimate(attribute)) for step in curve.steps]
        points = [point for point in points if isfinite(point[1].value) and isfinite(point[2].value)]
        if points:
            drawn[curve.label] = _draw_curve(axes, curve, _look(curve, curves), points)
    _label_axes(axes, fluency)
    return drawn


def _draw_curve(axes: Any, curve: Curve, look: dict[str, Any], points: list[tuple[str, Estimate, Estimate]]) -> Any:
    across, up = [x for _, x, _ in points], [y for _, _, y in points]
    x, y = [one.value for one in across], [one.value for one in up]
    errors = {"xerr": error_bars(across), "yerr": error_bars(up)}
    axes.errorbar(x, y, **errors, fmt="none", ecolor=look["color"], elinewidth=0.9, alpha=0.45, zorder=2)
    (line,) = axes.plot(x, y, **look, zorder=4 if curve.unguided else 3)
    for label, one, other in [] if curve.unguided else points:
        _write_at(axes, label, one.value, other.value, look["color"], MARKERS.index(look["marker"]))
    return line


def _look(curve: Curve, curves: Sequence[Curve]) -> dict[str, Any]:
    """Choose colour and marker by the guide, and the line by the setting."""
    settings = unique(other.setting for other in curves if not other.unguided)
    if curve.unguided:
        hollow = {} if curve.setting in settings[:1] or not settings else {"mfc": "none"}
        return {"color": INK, "marker": "*", "ls": "none", "ms": 12} | hollow
    guide = unique(other.guide for other in curves if not other.unguided).index(curve.guide)
    setting = settings.index(curve.setting)
    return {
        "color": COLOURS[guide % len(COLOURS)],
        "marker": MARKERS[guide % len(MARKERS)],
        "ls": LINES[setting % len(LINES)],
        "lw": 1.7,
        "ms": 5.5,
    }


def _write_at(axes: Any, label: str, x: float, y: float, colour: str, corner: int) -> None:
    right, up, side = CORNERS[corner % len(CORNERS)]
    place = {"xytext": (right, up), "textcoords": "offset points", "ha": side, "fontsize": 7, "color": colour}
    axes.annotate(label, (float(x), float(y)), **place, zorder=5).set_in_layout(False)


def error_bars(estimates: list[Estimate]) -> Float[np.ndarray, "2 c"]:
    """The lengths of error bars below and above; 0 where an end is unknown, or on the other side of the value."""
    low = [one.value - one.low if isfinite(one.low) else 0.0 for one in estimates]
    high = [one.high - one.value if isfinite(one.high) else 0.0 for one in estimates]
    return np.maximum(np.array([low, high]), 0.0)


def _label_axes(axes: Any, fluency: str) -> None:
    ticker = require_package("matplotlib.ticker", "report")
    against, model = metric_and_judge(fluency)
    axes.set_xlabel(_axis_label(against, model))
    axes.margins(0.08)
    low, high = axes.dataLim.intervalx
    if METRICS[against].wide_range and 0 < 4 * low < high:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def _add_legends(figure: Any, curves: list[Curve], drawn: dict[str, Any]) -> float:
    """Add a legend of all curves above, and one of the paper's curves below; return the height of both."""
    empty = require_package("matplotlib.lines", "report").Line2D([], [], ls="none")
    labels = [curve.label for curve in curves]
    ours = {label if label in drawn else f"{label}: not measured": drawn.get(label, empty) for label in labels}
    theirs = {label: line for label, line in drawn.items() if label not in labels}
    height = 0.0
    for lines, place, title in ((ours, "upper", "numbers at points: β"), (theirs, "lower", "published numbers")):
        if lines:
            across = max(1, min(len(lines), LEGEND_CHARACTERS // (max(map(len, lines)) + 8)))
            height += LEGEND_ROW * (2 - (-len(lines) // across))
            look = {"loc": f"outside {place} left", "ncols": across, "title": title, "alignment": "left"}
            figure.legend(lines.values(), lines.keys(), **look)
    return height


def _axis_label(metric: str, judge: str) -> str:
    return f"{METRICS[metric].axis} [{_middle_cut(judge, 40)}]" if judge else str(METRICS[metric].axis)


def _middle_cut(name: str, length: int) -> str:
    """Shorten a long name in its middle."""
    half = length // 2
    return name if len(name) <= length else f"{name[:half]}…{name[-half:]}"


# --- pairs of guides ---


def plot_differences(name: str, differences: Sequence[GuideDifference]) -> Plot | None:
    """Plot the difference at equal perplexity with its interval, a line per pair of guides and class of prompts."""
    known = [pair for pair in differences if isfinite(pair.value)]
    keys = sorted(unique(pair.metric for pair in known))
    if not keys:
        return None
    sizes = [sum(pair.metric == key for pair in known) for key in keys]
    with plot_style(name):
        figure = make_figure()
        figure.set_size_inches(WIDTH, 0.8 * len(keys) + 0.3 * sum(sizes))
        panels = figure.subplots(len(keys), 1, squeeze=False, height_ratios=[2 + size for size in sizes])
        for axes, key in zip(panels[:, 0], keys, strict=True):
            _draw_forest(axes, [pair for pair in known if pair.metric == key], key)
        return render(figure, name, "Differences between guides at equal perplexity")


def _draw_forest(axes: Any, pairs: list[GuideDifference], key: str) -> None:
    axes.axvline(0, color=INK, lw=1, zorder=1)
    for height, pair in enumerate(reversed(pairs)):
        estimate = Estimate(pair.value, pair.low, pair.high)
        colour = COLOURS[0] if is_decided(pair) else GREYS[0]
        look = {"fmt": "o", "color": colour, "capsize": 3, "lw": 1.6, "mfc": colour if is_decided(pair) else "none"}
        axes.errorbar([pair.value], [height], xerr=error_bars([estimate]), **look)
    axes.set_yticks(
        range(len(pairs)), [f"{pair.first} − {pair.second}, {_middle_cut(pair.group, 24)}" for pair in reversed(pairs)]
    )
    axes.set_ylim(-0.7, len(pairs) - 0.3)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"difference of {_middle_cut(key, 80)}: first − second")


def is_decided(pair: GuideDifference) -> bool:
    """Whether the interval excludes zero, and comes from enough prompts to rely on it."""
    return Estimate(pair.value, pair.low, pair.high).excludes_zero and is_trusted(pair.prompts)


# --- figures ---


@contextmanager
def plot_style(name: str) -> Iterator[None]:
    """Use the style of radq's plots inside the block; `name` makes the ids of the SVG reproducible."""
    matplotlib = require_package("matplotlib", "report")
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about names with letters that the font of the PNG lacks
        yield


def make_figure() -> Any:
    return require_package("matplotlib.figure", "report").Figure(layout="constrained")


def render(figure: Any, name: str, title: str) -> Plot:
    """Render a figure as SVG and PNG, without dates, so that the same figure gives the same bytes."""
    svg, png = io.BytesIO(), io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
    figure.set_layout_engine("none")  # the layout is final after the first rendering
    figure.savefig(png, format="png", metadata={"Software": None})
    return Plot(name, title, svg.getvalue().decode(), png.getvalue())
