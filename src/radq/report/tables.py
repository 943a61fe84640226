"""Tables of results: markdown and LaTeX for people, csv with every digit for programs.

table = result_table(results)          # of one class of prompts
to_markdown(table), to_latex(table)
to_csv(results)                        # of all classes
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf, isnan

import numpy as np

from radq.evaluation.estimates import Estimate
from radq.evaluation.metrics import METRICS, metric_and_judge
from radq.report.results import NAN, Result, unique
from radq.settings import exact

SETTINGS = {"beta": "β", "best_of": "n", "ask": "request", "top_k": "k", "top_p": "p", "kl_budget": "KL budget"}
COST_TITLES = {
    "tokens_per_second": "tokens/s",
    "calls_per_token": "calls/token",
    "expert_tokens_per_token": "expert tokens/token",
    "peak_memory": "peak GiB",
}
LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "{}$&#%_"},
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "β": r"$\beta$",
    "−": "$-$",
    "–": "--",
    "≤": r"$\le$",
    "∞": r"$\infty$",
    "\ufffd": "?",
}


@dataclass(frozen=True)
class Entry:
    """A text or number in a table, with its confidence interval."""

    text: str
    interval: str = ""


@dataclass(frozen=True)
class Table:
    """A title, a header and rows of entries."""

    title: str
    header: list[str]
    rows: list[list[Entry]]
    words: int = 1  # the number of columns at the left that hold words; the others hold numbers


# --- contents ---


def metric_keys(results: Sequence[Result]) -> list[str]:
    """List the metrics of the results, in the order of `METRICS`."""
    return sorted(unique(key for result in results for key in result.metrics), key=metric_order)


def metric_order(key: str) -> int:
    """Return the place of metric[judge] in `METRICS`."""
    return list(METRICS).index(metric_and_judge(key)[0])


def result_table(results: Sequence[Result], title: str = "") -> Table:
    """Make a table with a row per cell; settings that no cell has are left out."""
    settings = [name for name in SETTINGS if any(getattr(result, name) is not None for result in results)]
    keys, costs = metric_keys(results), unique(name for result in results for name in result.cost)
    header = ["guide", *(SETTINGS[name] for name in settings), "seed", *keys]
    header += [COST_TITLES.get(name, name) for name in costs]
    rows = []
    for result in results:
        numbers = [getattr(result, name) for name in settings]
        row = [Entry(result.guide), *(Entry("–" if number is None else exact(number)) for number in numbers)]
        row += [Entry(str(result.seed)), *(write_estimate(result.metrics.get(key)) for key in keys)]
        scales = [2**30 if name == "peak_memory" else 1 for name in costs]
        used = [result.cost.get(name, NAN) / scale for name, scale in zip(costs, scales, strict=True)]
        rows.append([*row, *(Entry(number(cost)) for cost in used)])
    return Table(title, header, rows)


def left_out_table(results: Sequence[Result]) -> Table:
    """Count the samples that are left out of a metric, over all cells of a guide; guides without any have no row."""
    counts: dict[tuple[str, str, str], np.ndarray] = {}
    for result in results:
        for key, estimate in result.metrics.items():
            count = counts.setdefault((result.guide, result.group, key), np.zeros(3, dtype=int))
            count += (estimate.skipped, estimate.infinite, isnan(estimate.value))
    rows = [[*map(Entry, names), *(Entry(str(n)) for n in count)] for names, count in counts.items() if count.any()]
    header = ["guide", "prompts", "metric", "blank samples", "infinite samples", "cells without a value"]
    return Table("", header, rows, words=3)


def number(value: float, sign: str = "") -> str:
    """Write a number with three or four digits; NaN becomes a dash."""
    if isnan(value):
        return "–"
    if isinf(value):
        return "∞" if value > 0 else "−∞"
    digits = ".3f" if abs(value) < 10 else ".2f" if abs(value) < 1000 else ".4g"
    return format(value, sign + digits).replace("-", "−")


def interval(estimate: Estimate, sign: str = "") -> str:
    """Write an interval in brackets; an unknown interval is empty."""
    known = not (isnan(estimate.low) and isnan(estimate.high))
    return f"[{number(estimate.low, sign)}, {number(estimate.high, sign)}]" if known else ""


def write_estimate(estimate: Estimate | None, sign: str = "") -> Entry:
    """Write a value with its interval; an unknown one becomes a dash."""
    return Entry("–") if estimate is None else Entry(number(estimate.value, sign), interval(estimate, sign))


# --- formats ---


def to_markdown(table: Table) -> str:
    """Write a table in markdown, with its title as a heading."""
    rules = ["---" if column < table.words else "---:" for column in range(len(table.header))]
    rows = [[_markdown(name) for name in table.header], rules]
    rows += [[f"{_markdown(entry.text)} {entry.interval}".strip() for entry in row] for row in table.rows]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"### {_markdown(table.title)}\n\n{lines}\n" if table.title else f"{lines}\n"


def to_latex(table: Table) -> str:
    """Write a table in LaTeX, which needs the package booktabs."""
    columns = "l" * table.words + "r" * (len(table.header) - table.words)
    rows = [
        [latex(entry.text) + (rf" {{\scriptsize {latex(entry.interval)}}}" if entry.interval else "") for entry in row]
        for row in table.rows
    ]
    body = [rf"{{}}{' & '.join(row)} \\" for row in rows]  # without {}, a name like [x] would be an argument of \\
    head = rf"{' & '.join(map(latex, table.header))} \\"
    begin, end = rf"\begin{{tabular}}{{{columns}}}", r"\end{tabular}"
    lines = [f"% {table.title}", begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", end]
    return "\n".join(lines) + "\n"


def to_csv(results: Sequence[Result]) -> str:
    """Write every cell with every digit; unknown numbers are empty."""
    keys, costs = metric_keys(results), unique(name for result in results for name in result.cost)
    parts = {"value": "", "low": "_low", "high": "_high", "skipped": "_skipped", "infinite": "_infinite"}
    known = ("run", "cell", "guide", *SETTINGS, "seed", "group")
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*known, *(key + ending for key in keys for ending in parts.values()), *costs])
    for result in results:
        numbers = [getattr(result.metrics.get(key), part, None) for key in keys for part in parts]
        row = [*(getattr(result, name) for name in known), *numbers, *(result.cost.get(name) for name in costs)]
        writer.writerow(["" if value is None or value != value else value for value in row])
    return lines.getvalue()


def latex(text: str) -> str:
    """Escape a text for LaTeX."""
    return "".join(LATEX.get(character, character) for character in text)


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", text)
