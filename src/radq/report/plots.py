"""Plots: attributes against fluency with one curve per guide, our guide against others at equal fluency, a calibration.

    plot = plot_tradeoff("tradeoff-all", "all", results, find_published)   # results of one class of prompts
    plot.svg, plot.png, plot.inline                                        # files, and a drawing for a page

Guides differ in colour and marker, settings in the line; dashed lines are the paper's. Text stays text in the SVG.
Perplexity is drawn as a multiple of the unguided base model's where that was measured, on a logarithmic axis.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from math import isfinite
from typing import Any

import numpy as np
from jaxtyping import Float

from radq.errors import require_package
from radq.evaluation.estimates import Estimate
from radq.evaluation.metrics import ATTRIBUTE_METRICS, FLUENCY_METRICS, METRICS, metric_and_judge
from radq.models.calibration import NAMED, Calibration, Interval, MeasuredPoint, Setting
from radq.report.comparisons import Comparison
from radq.report.curves import Curve, find_curves, name_group
from radq.report.results import NAN, Result, unique
from radq.report.tables import metric_keys

OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # a palette for colour-blind readers
COLOURS = (*OKABE_ITO, "#7a3fa0", "#8a5a2b", "#d4145a", "#7a8b00", "#a3c400", "#8f8fd0")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # with 12 colours, pairs repeat after 84 guides
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
LINEAR_SPAN = 1.4  # a logarithmic axis of a smaller span would look linear, and have few ticks
WIDE_TICKS, FINE_TICKS = (1, 2, 5), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)  # of a logarithmic axis
# Offsets of the β that is written beside a point.
CORNERS = ((4, 4, "left"), (4, -10, "left"), (-4, -10, "right"), (-4, 4, "right"))


@dataclass(frozen=True)
class PublishedCurve:
    """The numbers of one method in the paper, by β."""

    method: str
    top_k: int | None  # None for LLaMA, where the paper does not name it
    base: str
    judge: str
    points: tuple[tuple[float, float, float], ...]  # β, fluency, attribute

    @property
    def label(self) -> str:
        setting = "" if self.top_k is None else f", k={self.top_k}"
        return f"{self.method}{setting} (paper: {self.base}, {self.judge})"


Published = Callable[[str, str], list[PublishedCurve]]  # finds the paper's curves of an attribute against a fluency


@dataclass(frozen=True)
class Plot:
    """A drawing as SVG and PNG."""

    name: str
    title: str
    svg: str = field(repr=False)
    png: bytes = field(repr=False)

    @property
    def inline(self) -> str:
        """The SVG for a page with other drawings: with unique ids, in the page's text colour, without declarations."""

        def adapt(tag: re.Match[str]) -> str:
            plain = re.sub(r' xmlns(:\w+)?="[^"]*"', "", tag[0].replace(INK, "currentColor"))
            return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", plain)

        # Only tags are changed: names in the text are left as they are.
        drawing = re.sub(r"<[^<>]*>", adapt, self.svg[self.svg.index("<svg") :])
        return drawing.replace("<svg", f'<svg role="img" aria-label="{escape(self.title)}"', 1)

    def _repr_html_(self) -> str:
        return self.inline

    @property
    def themed(self) -> str:
        """The SVG as a file of its own, whose colours follow the reader's light or dark mode."""
        drawing = re.sub(r"<[^<>]*>", lambda tag: tag[0].replace(INK, "currentColor"), self.svg)
        return re.sub(r"(<svg[^<>]*>)", rf"\g<1><style>{THEMES}</style>", drawing, count=1)


# --- attribute against fluency ---


def plot_tradeoff(name: str, group: str, results: Sequence[Result], published: Published) -> Plot | None:
    """Plot the attributes of a class of prompts against perplexity, KL and MAUVE; None where there is none of both."""
    keys = [key for key in metric_keys(results) if _is_measured(key, results)]
    rows, columns = (
        [key for key in keys if metric_and_judge(key)[0] in metrics] for metrics in (ATTRIBUTE_METRICS, FLUENCY_METRICS)
    )
    if not rows or not columns:
        return None
    curves = find_curves(results)
    grid, labels = [], []
    for attribute in rows:
        metric, judge = metric_and_judge(attribute)
        labels.append(f"{metric}: {METRICS[metric].axis}")
        panels = [Panel("", curves, fluency, attribute, published(attribute, fluency)) for fluency in columns]
        panels[0] = replace(panels[0], heading=_middle_cut(attribute, 100) if judge else "")
        grid.append(panels)
    title = f"Trade-off of {', '.join(unique(curve.guide for curve in curves))} on {name_group(group)}"
    return _plot_grid(name, title, grid, labels, curves)


def plot_by_candidates(name: str, title: str, results: Sequence[Result], attribute: str) -> Plot | None:
    """Plot an attribute against perplexity, a panel per choice of candidates; None where there is nothing to draw."""
    if not (_is_measured(attribute, results) and _is_measured("perplexity", results)):
        return None
    curves = find_curves(results)
    panels = []
    for setting in unique(curve.setting for curve in curves):
        here = [replace(curve, setting="", steps=curve.steps if curve.setting == setting else []) for curve in curves]
        panels.append(Panel(setting, here, "perplexity", attribute, []))
    plain = [replace(curve, setting="") for curve in curves]
    return _plot_grid(name, title, [panels], [_axis_label(*metric_and_judge(attribute))], plain)


@dataclass(frozen=True)
class Panel:
    """An attribute against fluency, with the curves of guides and of the paper."""

    heading: str
    curves: list[Curve]
    fluency: str
    attribute: str
    published: list[PublishedCurve]


def _plot_grid(name: str, title: str, grid: list[list[Panel]], labels: list[str], curves: list[Curve]) -> Plot:
    """Plot rows of panels, each row with a label, under one legend of `curves`."""
    with drawing(name) as figure:
        places = figure.subplots(len(grid), len(grid[0]), squeeze=False, sharey="row")
        drawn: dict[str, Any] = {}  # lines by label, for the legend
        for row, label, panels in zip(places, labels, grid, strict=True):
            for axes, panel in zip(row, panels, strict=True):
                drawn |= _draw_panel(axes, panel)
                axes.set_title(panel.heading, loc="left")
            row[0].set_ylabel(label)
        height = _add_legends(figure, curves, drawn)
        figure.set_size_inches(WIDTH, PANEL_HEIGHT * len(grid) + height)
        _hide_crowded(figure)
        return render(figure, name, title)


def _is_measured(key: str, results: Sequence[Result]) -> bool:
    return any(isfinite(result.metrics[key].value) for result in results if key in result.metrics)


def _draw_panel(axes: Any, panel: Panel) -> dict[str, Any]:
    """Draw all curves that have points here; return their lines by label."""
    drawn: dict[str, Any] = {}
    for number, curve in enumerate(panel.published):
        _, x, y = np.array(curve.points).T
        grey, marker = GREYS[number % len(GREYS)], MARKERS[number % len(MARKERS)]
        style = {"color": grey, "marker": marker, "ls": "--", "lw": 1, "ms": 4, "mfc": "none", "alpha": 0.9}
        (drawn[curve.label],) = axes.plot(x, y, **style, zorder=1)
        for end in (0, -1):
            _write_at(axes, f"{curve.points[end][0]:g}", x[end], y[end], grey, corner=1)
    is_relative = METRICS[metric_and_judge(panel.fluency)[0]].wide_range and not panel.published
    references = {curve.label: curve.reference for curve in panel.curves if curve.steps and is_relative}
    bases = {label: NAN if one is None else one.estimate(panel.fluency).value for label, one in references.items()}
    if not all(isfinite(base) and base > 0 for base in bases.values()):
        bases = {}  # where an unguided perplexity is unknown, none is divided by it
    for curve in panel.curves:
        base = bases.get(curve.label, 1.0)
        points = []
        for step in curve.steps:
            x, y = step.estimate(panel.fluency), step.estimate(panel.attribute)
            if isfinite(x.value) and isfinite(y.value):
                points.append((step.label, Estimate(x.value / base, x.low / base, x.high / base), y))
        if points:
            drawn[curve.label] = _draw_curve(axes, curve, _look(curve, panel.curves), points)
    _label_axes(axes, panel.fluency, relative=bool(bases))
    return drawn


def _draw_curve(axes: Any, curve: Curve, look: dict[str, Any], points: list[tuple[str, Estimate, Estimate]]) -> Any:
    labels, *ends = zip(*points, strict=True)
    (x, y), (x_bars, y_bars) = ([one.value for one in end] for end in ends), map(error_bars, ends)
    look_of_bars = {"fmt": "none", "ecolor": look["color"], "elinewidth": 0.9, "alpha": 0.45}
    axes.errorbar(x, y, xerr=x_bars, yerr=y_bars, **look_of_bars, zorder=2)
    (line,) = axes.plot(x, y, **look, zorder=4 if curve.unguided else 3)
    for label, across, up in [] if curve.unguided else zip(labels, x, y, strict=True):
        _write_at(axes, label, across, up, look["color"], MARKERS.index(look["marker"]))
    return line


def _look(curve: Curve, curves: Sequence[Curve]) -> dict[str, Any]:
    """Choose colour and marker by the guide, and the line by the setting."""
    settings = unique(other.setting for other in curves if not other.unguided)
    if curve.unguided:
        hollow = {} if curve.setting in settings[:1] or not settings else {"mfc": "none"}
        return {"color": INK, "marker": "*", "ls": "none", "ms": 12} | hollow
    guides = unique(other.guide for other in curves if not other.unguided)
    setting = settings.index(curve.setting)
    return {
        "color": choose_colour(curve.guide, guides),
        "marker": MARKERS[guides.index(curve.guide) % len(MARKERS)],
        "ls": LINES[setting % len(LINES)],
        "lw": 1.7,
        "ms": 5.5,
    }


def choose_colour(guide: str, guides: Sequence[str]) -> str:
    """Choose the colour of a guide by its place among the guides; it is the same in plots and on the page."""
    return COLOURS[list(guides).index(guide) % len(COLOURS)]


def _write_at(axes: Any, label: str, x: float, y: float, colour: str, corner: int) -> None:
    right, up, side = CORNERS[corner % len(CORNERS)]
    place = {"xytext": (right, up), "textcoords": "offset points", "ha": side, "fontsize": 7, "color": colour}
    axes.annotate(label, (float(x), float(y)), **place, zorder=5).set_in_layout(False)


def _hide_crowded(figure: Any) -> None:
    """Hide numbers at points that would cover others, so that those that are left can be read."""
    figure.draw_without_rendering()  # places the texts
    for axes in figure.axes:
        shown: list[Any] = []
        for text in axes.texts:
            box = text.get_window_extent()
            if any(box.overlaps(other) for other in shown):
                text.set_visible(False)
            else:
                shown.append(box)


def error_bars(estimates: Sequence[Estimate]) -> Float[np.ndarray, "2 c"]:
    """Compute the lengths of error bars below and above, 0 for an end that is unknown or on the value's other side."""
    low = [one.value - one.low if isfinite(one.low) else 0.0 for one in estimates]
    high = [one.high - one.value if isfinite(one.high) else 0.0 for one in estimates]
    return np.maximum(np.array([low, high]), 0.0)


def _label_axes(axes: Any, fluency: str, relative: bool) -> None:
    ticker = require_package("matplotlib.ticker", "report")
    against, model = metric_and_judge(fluency)
    label = _axis_label(against, model)
    axes.set_xlabel(f"{label}, times the unguided base model's" if relative else label)
    axes.margins(0.08)
    low, high = axes.dataLim.intervalx
    if METRICS[against].wide_range and 0 < LINEAR_SPAN * low < high:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=WIDE_TICKS if high > 6 * low else FINE_TICKS))
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g×" if relative else "%g"))
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
            height += 2 * LEGEND_ROW + add_legend(figure, lines, place=place, title=title, alignment="left")
    return height


def _axis_label(metric: str, judge: str) -> str:
    return f"{METRICS[metric].axis} [{_middle_cut(judge, 40)}]" if judge else str(METRICS[metric].axis)


def _middle_cut(name: str, length: int) -> str:
    """Shorten a long name in its middle."""
    half = length // 2
    return name if len(name) <= length else f"{name[:half]}…{name[-half:]}"


# --- our guide against others ---


def plot_comparisons(name: str, comparisons: Sequence[Comparison], guides: Sequence[str]) -> Plot | None:
    """Plot differences with intervals, a panel per metric and axis, a line per other guide and class of prompts."""
    known = [comparison for comparison in comparisons if comparison.is_known]
    by_panel: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in known:
        by_panel.setdefault((comparison.metric, comparison.axis), []).append(comparison)
    if not known:
        return None
    sizes = list(map(len, by_panel.values()))
    with drawing(name) as figure:
        figure.set_size_inches(WIDTH, 0.8 * len(sizes) + 0.3 * sum(sizes))
        panels = figure.subplots(len(sizes), 1, squeeze=False, height_ratios=[2 + size for size in sizes])
        for axes, part in zip(panels[:, 0], by_panel.values(), strict=True):
            _draw_forest(axes, part, guides)
        ours = ", ".join(unique(one.ours for one in known))
        nouns = " and at equal ".join(unique(one.axis_noun for one in known))
        return render(figure, name, f"{ours} against other guides at equal {nouns}")


def _draw_forest(axes: Any, comparisons: list[Comparison], guides: Sequence[str]) -> None:
    axes.axvline(0, color=INK, lw=1, zorder=1)
    for height, one in enumerate(reversed(comparisons)):
        colour = choose_colour(one.other, guides)
        look = {"fmt": "o", "color": colour, "capsize": 3, "lw": 1.6, "mfc": "none" if one.doubt else colour}
        axes.errorbar([one.difference.value], [height], xerr=error_bars([one.difference]), **look)
    labels = [f"{one.word} {one.other}, {_middle_cut(one.place, 24)}" for one in reversed(comparisons)]
    axes.set_yticks(range(len(comparisons)), labels)
    axes.set_ylim(-0.7, len(comparisons) - 0.3)
    axes.grid(axis="y", visible=False)
    first = comparisons[0]
    sides = {one.better_side for one in comparisons}
    better = {1: " (better →)", -1: " (← better)"}.get(first.better_side, "") if len(sides) == 1 else ""
    ours = " or ".join(unique(one.ours for one in comparisons))
    difference = f"{_middle_cut(first.metric, 60)}: {_middle_cut(ours, 60)} minus the other guide"
    axes.set_xlabel(f"{difference} at equal {first.axis_noun}{better}")


# --- figures ---


@contextmanager
def drawing(name: str) -> Iterator[Any]:
    """Make a figure in the style of radq's plots, which holds in the block; `name` makes its ids reproducible."""
    matplotlib = require_package("matplotlib", "report")
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about names with letters that the font of the PNG lacks
        yield require_package("matplotlib.figure", "report").Figure(layout="constrained")


def add_legend(figure: Any, lines: dict[str, Any], width: float = WIDTH, place: str = "upper", **look: Any) -> float:
    """Add a legend of lines by their labels, above or below a figure of this width; return the height of its rows."""
    across = max(1, min(len(lines), int(LEGEND_CHARACTERS * width / WIDTH) // (max(map(len, lines)) + 8)))
    figure.legend(lines.values(), lines.keys(), loc=f"outside {place} left", ncols=across, **look)
    return LEGEND_ROW * -(-len(lines) // across)


def render(figure: Any, name: str, title: str) -> Plot:
    """Render a figure as SVG and PNG, without dates, so that the same figure gives the same bytes."""
    svg, png = io.BytesIO(), io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
    figure.set_layout_engine("none")  # the layout is final after the first rendering
    figure.savefig(png, format="png", metadata={"Software": None})
    return Plot(name, title, svg.getvalue().decode(), png.getvalue())


def plot_calibration(calibration: Calibration) -> Plot:
    """Plot what was measured with intervals, the bound of the perplexity, and the strengths by name."""
    with drawing("calibration") as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        measured = calibration.measured
        _draw_levels(above, calibration, [point.score for point in measured], COLOURS[0], "o")
        _draw_levels(below, calibration, [point.perplexity_ratio for point in measured], COLOURS[1], "s")
        below.axhline(calibration.max_perplexity_ratio, color=INK, lw=1, ls="--")
        above.set_ylabel(calibration.metric)
        below.set_ylabel("perplexity, × unguided")
        below.set_xlabel("KL budget, nats per token" if calibration.by == "kl" else "β")
        above.set_title(f"{calibration.attribute} over {calibration.base}, by {calibration.judge}", loc="left")
        transforms = require_package("matplotlib.transforms", "report")
        blended = transforms.blended_transform_factory(above.transData, above.transAxes)
        for name, strength in NAMED.items():
            level = _find_level(calibration, calibration.at(strength))
            above.axvline(level, color=COLOURS[2], lw=1, ls=":")
            above.text(level, 0.03, f" {name}", transform=blended, rotation=90, va="bottom", ha="right", color=INK)
        figure.set_size_inches(6.4, 1.7 * PANEL_HEIGHT)
        return render(figure, "calibration", f"Strengths of {calibration.attribute} over {calibration.base}")


def _find_level(calibration: Calibration, setting: Setting | MeasuredPoint) -> float:
    """The number in which strengths differ: β, or the KL budget, which is 0 for the unguided base model."""
    if calibration.by == "beta":
        return setting.beta
    return 0.0 if setting.beta == 0 or setting.kl_budget is None else setting.kl_budget


def _draw_levels(axes: Any, calibration: Calibration, values: list[Interval], colour: str, marker: str) -> None:
    """Draw values with their intervals over the range of the strengths."""
    levels = [_find_level(calibration, point) for point in calibration.measured]
    axes.axvspan(0, _find_level(calibration, calibration.at(1.0)), color=COLOURS[2], alpha=0.15, lw=0)
    bars = error_bars([Estimate(*value) for value in values])
    middles = [value for value, _, _ in values]
    axes.errorbar(levels, middles, yerr=bars, color=colour, marker=marker, ms=5, lw=1.5, capsize=3)
