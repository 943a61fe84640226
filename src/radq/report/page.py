"""The page of a report: one html file that needs nothing else, neither network nor scripts.

Names and texts come from strangers: all are escaped, and the page's policy forbids scripts and requests altogether.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import combinations
from math import isfinite

from radq.evaluation.metrics import METRICS, Estimate
from radq.report.curves import ATTRIBUTES, Curve, find_curves, unique
from radq.report.plots import Plot, is_decided
from radq.report.published import published_calls
from radq.report.results import GuideDifference, Result, Run, Sample, metric_and_judge
from radq.report.tables import (
    Table,
    difference_table,
    interval,
    left_out_table,
    metric_keys,
    number,
    result_table,
    to_html,
)

HEADLINES = 6  # pairs of guides in words at the top; the table has all
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Content:
    """All that a page shows."""

    runs: list[Run]
    tradeoffs: list[tuple[str, Plot]]  # class of prompts and plot
    differences: Plot | None
    samples: list[Sample]
    published: bool
    notes: list[str]

    @property
    def results(self) -> list[Result]:
        return [result for run in self.runs for result in run.results]


def write_page(content: Content) -> str:
    title = f"Report: {', '.join(run.name for run in content.runs)}"
    sections = [
        ("tradeoff", "Trade-off", _tradeoffs(content)),
        ("pairs", "Guides at equal perplexity", _pairs(content)),
        ("results", "Results", _results(content)),
        ("left-out", "What is left out", _left_out(content.results)),
        ("samples", "Samples", _samples(content)),
        ("definitions", "Definitions", _definitions(content)),
        ("configuration", "Configuration", _configuration(content.runs)),
    ]
    links = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections)
    body = "\n".join(
        f'<section id="{name}">\n<h2>{heading}</h2>\n{html}\n</section>' for name, heading, html in sections
    )
    css = (files("radq.evaluation") / "page.css").read_text(encoding="utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{_facts(content)}
{_headlines(content)}
{_notes(content.notes)}
<nav>{links}</nav>
</header>
{body}
</body>
</html>
"""


# --- the top ---


def _facts(content: Content) -> str:
    results = content.results
    guides, groups = unique(result.guide for result in results), unique(result.group for result in results)
    cells = len({(result.run, result.cell) for result in results})
    facts = (
        f"{_count(len(guides), 'guide')} ({', '.join(guides)}), {_count(cells, 'cell')}, prompts: {', '.join(groups)}"
    )
    return f'<p class="soft">{escape(facts)}</p>'


def _headlines(content: Content) -> str:
    pairs = [pair for run in content.runs for pair in run.differences if isfinite(pair.value)]
    if not pairs:
        return ""
    group = order_groups([pair.group for pair in pairs])[0]
    metric = min((pair.metric for pair in pairs if pair.group == group), key=_attribute_order)
    chosen = [pair for pair in pairs if (pair.group, pair.metric) == (group, metric)]
    rest = f"<li>… and {len(chosen) - HEADLINES} more pairs below.</li>" if len(chosen) > HEADLINES else ""
    items = "".join(f"<li>{escape(_in_words(pair))}</li>" for pair in chosen[:HEADLINES])
    return f'<ul class="headline">{items}{rest}</ul>'


def _in_words(pair: GuideDifference) -> str:
    found = Estimate(pair.value, pair.low, pair.high)
    low, high = map(number, pair.perplexity_range)
    verdict = "the interval excludes 0" if is_decided(pair) else "the interval includes 0" if interval(found) else ""
    amount = f"{number(abs(pair.value))} {'more' if pair.value > 0 else 'less'} {pair.metric} than {pair.second}"
    details = "; ".join(part for part in (f"{number(pair.value, '+')} {interval(found, '+')}".strip(), verdict) if part)
    return f"{pair.first} has {amount} at equal perplexity ({low} to {high}), {pair.group} prompts: {details}."


def _attribute_order(key: str) -> int:
    return [*ATTRIBUTES, *METRICS].index(metric_and_judge(key)[0])


def order_groups(groups: Sequence[str]) -> list[str]:
    """All prompts first, then their classes."""
    return sorted(groups, key=lambda group: group != "all")


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


# --- sections ---


def _tradeoffs(content: Content) -> str:
    if not content.tradeoffs:
        return "<p>No cell has both an attribute and perplexity or MAUVE: there is nothing to plot.</p>"
    paper = (
        " Dashed grey curves are the paper’s published numbers, with its own prompts, judges and language models."
        if content.published
        else ""
    )
    caption = (
        "A curve joins the cells of one guide in the order of β, which stands at each point; bars are confidence "
        "intervals, seeds are averaged. The star is the base model unguided." + paper
    )
    figures = [f"<h3>{escape(group)} prompts</h3>\n<figure>{plot.inline}</figure>" for group, plot in content.tradeoffs]
    return f'<p class="soft">{caption}</p>\n' + "\n".join(figures)


def _pairs(content: Content) -> str:
    pairs = [pair for run in content.runs for pair in run.differences]
    parts = [f"<figure>{content.differences.inline}</figure>"] if content.differences else []
    if pairs:
        parts += [
            '<p class="soft">The first guide’s metric minus the second’s, averaged over the range of log perplexity '
            "that both reach; in blue where the interval excludes 0.</p>",
            to_html(difference_table(pairs)),
        ]
    missing = unique(f"{first} and {second}" for run in content.runs for first, second in _not_compared(run))
    if missing:
        reason = "They have no common range of perplexity, or fewer than two values of β: sweep β until they overlap."
        parts.append(f"<p>Not compared: {escape(', '.join(missing))}. {reason}</p>")
    if len(content.runs) > 1:
        parts.append(
            "<p>Guides of different runs are not compared: intervals are made over the prompts of one run.</p>"
        )
    return "\n".join(parts)


def _not_compared(run: Run) -> list[tuple[str, str]]:
    """Pairs of guides without a single difference."""
    known = {frozenset((pair.first, pair.second)) for pair in run.differences if isfinite(pair.value)}
    guides = unique(result.guide for result in run.results if not result.unguided)
    return [pair for pair in combinations(guides, 2) if frozenset(pair) not in known]


def _results(content: Content) -> str:
    groups = order_groups(unique(result.group for result in content.results))
    tables = [
        f"<h3>{escape(group)} prompts</h3>\n"
        + to_html(result_table([result for result in content.results if result.group == group]))
        for group in groups
    ]
    calls = f"<p>Calls per token in the paper: {escape(published_calls())}.</p>" if content.published else ""
    return "\n".join([*tables, calls])


def _left_out(results: Sequence[Result]) -> str:
    table: Table = left_out_table(results)
    if not table.rows:
        return "<p>Nothing: no sample was blank or infinite, and every metric has a value.</p>"
    return (
        "<p>Blank samples have neither score nor perplexity; infinite ones are those a language model thinks "
        "impossible. Both are left out of the means above, and counted here over all cells of a guide.</p>\n"
        + to_html(table)
    )


def _samples(content: Content) -> str:
    if not content.samples:
        return "<p>There are none.</p>"
    blocks = ['<p class="soft">The first prompts of each class. Models wrote these texts; some may offend.</p>']
    curves = find_curves(list({(result.run, result.cell): result for result in content.results}.values()))
    for sample in content.samples:
        columns = "".join(_column(curve, sample) for curve in curves)
        summary = f"<summary><b>{escape(sample.prompt)}</b> <small>{escape(sample.group)}</small></summary>"
        is_open = " open" if sample is content.samples[0] else ""
        blocks.append(f'<details{is_open}>{summary}<div class="columns">{columns}</div></details>')
    return "\n".join(blocks)


def _column(curve: Curve, sample: Sample) -> str:
    """What one guide made of a prompt at each β, with its first seed."""
    parts = []
    for step in curve.steps:
        first = step.results[0]
        texts = sample.continuations.get((first.run, first.cell), [])
        if texts and step.label:
            parts.append(f"<h5>{escape(step.label if step.label.startswith('KL') else f'β = {step.label}')}</h5>")
        parts += [f"<p>{escape(text) if text.strip() else '<i>blank</i>'}</p>" for text in texts]
    return f"<div><h4>{escape(curve.label)}</h4>{''.join(parts) or '<p><i>no text</i></p>'}</div>"


def _definitions(content: Content) -> str:
    keys = metric_keys(content.results)
    items = []
    for name in unique(metric_and_judge(key)[0] for key in keys):
        judges = [judge for key in keys for metric, judge in [metric_and_judge(key)] if metric == name and judge]
        by = f" <small>({escape(', '.join(judges))})</small>" if judges else ""
        items.append(f"<dt>{name}</dt><dd>{escape(METRICS[name].description)}{by}</dd>")
    more = (
        "<p>The guide “none” is the base model alone. Intervals come from resampling the prompts; where a point is the "
        "mean of several seeds, its interval is the mean of theirs. Calls and expert tokens are counted per generated "
        "token.</p>"
    )
    return f"<dl>{''.join(items)}</dl>\n{more}"


def _configuration(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        text = "there is no config.yaml." if run.config is None else run.config
        parts.append(f"<h3>{escape(str(run.name))}</h3>\n<pre>{escape(text)}</pre>")
    return "\n".join(parts)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
