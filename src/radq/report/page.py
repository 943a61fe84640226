"""The page of a report: one html file that needs nothing else, neither network nor scripts.

Names and texts come from strangers: the template page.html.j2 escapes all of them, and the page's policy forbids
scripts and requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import combinations
from math import isfinite

from radq.errors import require_package
from radq.evaluation.metrics import METRICS, Estimate
from radq.report.plots import Plot, is_decided
from radq.report.published import published_calls
from radq.report.results import (
    GuideDifference,
    PromptSamples,
    Result,
    Run,
    Step,
    find_curves,
    metric_and_judge,
    unique,
)
from radq.report.tables import difference_table, interval, left_out_table, metric_keys, number, result_table

HEADLINES = 6  # pairs of guides in words at the top; the table has all


@dataclass(frozen=True)
class PageContent:
    """The results, plots and texts that a page shows."""

    runs: list[Run]
    tradeoffs: list[tuple[str, Plot]]  # class of prompts and plot
    differences: Plot | None
    samples: list[PromptSamples]
    published: bool
    notes: list[str]

    @property
    def results(self) -> list[Result]:
        return [result for run in self.runs for result in run.results]

    @property
    def pairs(self) -> list[GuideDifference]:
        return [pair for run in self.runs for pair in run.differences]


def render_page(content: PageContent) -> str:
    """Render the page as html."""
    jinja2 = require_package("jinja2", "eval")
    folder = files("radq.report")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    results = content.results
    groups = order_groups(unique(result.group for result in results))
    return template.render(
        vars(content),
        title=f"Report: {', '.join(run.name for run in content.runs)}",
        css=(folder / "page.css").read_text(encoding="utf-8"),
        facts=_facts(results),
        headlines=_headlines(content.pairs),
        pairs=difference_table(content.pairs),
        not_compared=unique(f"{first} and {second}" for run in content.runs for first, second in _not_compared(run)),
        tables=[(group, result_table([result for result in results if result.group == group])) for group in groups],
        published_calls=published_calls(),
        left_out=left_out_table(results),
        curves=find_curves(list({(result.run, result.cell): result for result in results}.values())),
        texts_of=_texts_of,
        definitions=_definitions(results),
    )


def order_groups(groups: Sequence[str]) -> list[str]:
    """Put the class "all" first, then the other classes of prompts."""
    return sorted(groups, key=lambda group: group != "all")


def _facts(results: Sequence[Result]) -> str:
    guides, groups = unique(result.guide for result in results), unique(result.group for result in results)
    cells = len({(result.run, result.cell) for result in results})
    return (
        f"{_count(len(guides), 'guide')} ({', '.join(guides)}), {_count(cells, 'cell')}, prompts: {', '.join(groups)}"
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _headlines(pairs: Sequence[GuideDifference]) -> list[str]:
    """Compare pairs of guides in words, by the first metric of the first class of prompts."""
    known = [pair for pair in pairs if isfinite(pair.value)]
    if not known:
        return []
    group = order_groups([pair.group for pair in known])[0]
    metric = min((pair.metric for pair in known if pair.group == group), key=_metric_order)
    chosen = [pair for pair in known if (pair.group, pair.metric) == (group, metric)]
    rest = [f"… and {len(chosen) - HEADLINES} more pairs below."] if len(chosen) > HEADLINES else []
    return [*map(_in_words, chosen[:HEADLINES]), *rest]


def _in_words(pair: GuideDifference) -> str:
    found = Estimate(pair.value, pair.low, pair.high)
    low, high = map(number, pair.perplexity_range)
    verdict = "the interval excludes 0" if is_decided(pair) else "the interval includes 0" if interval(found) else ""
    amount = f"{number(abs(pair.value))} {'more' if pair.value > 0 else 'less'} {pair.metric} than {pair.second}"
    details = "; ".join(part for part in (f"{number(pair.value, '+')} {interval(found, '+')}".strip(), verdict) if part)
    return f"{pair.first} has {amount} at equal perplexity ({low} to {high}), {pair.group} prompts: {details}."


def _metric_order(key: str) -> int:
    return list(METRICS).index(metric_and_judge(key)[0])


def _not_compared(run: Run) -> list[tuple[str, str]]:
    """Find the pairs of guides that no metric compares."""
    known = {frozenset((pair.first, pair.second)) for pair in run.differences if isfinite(pair.value)}
    guides = unique(result.guide for result in run.results if not result.unguided)
    return [pair for pair in combinations(guides, 2) if frozenset(pair) not in known]


def _texts_of(sample: PromptSamples, step: Step) -> list[str]:
    """The continuations of a prompt at one step of a curve, with its first seed."""
    first = step.results[0]
    return sample.continuations.get((first.run, first.cell), [])


def _definitions(results: Sequence[Result]) -> list[tuple[str, str, list[str]]]:
    """The name, the description and the judges of each metric in the results."""
    keys = [metric_and_judge(key) for key in metric_keys(results)]
    return [
        (name, METRICS[name].description, [judge for metric, judge in keys if metric == name and judge])
        for name in unique(metric for metric, _ in keys)
    ]
