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
from radq.evaluation.metrics import METRICS, TRUSTED_PROMPTS, Estimate
from radq.report.curves import Step, find_curves
from radq.report.plots import Plot
from radq.report.published import published_calls
from radq.report.results import GuideDifference, PromptSamples, Result, Run, Sample, metric_and_judge, unique
from radq.report.summary import (
    MAX_PERPLEXITY_RATIO,
    Change,
    change_table,
    describe_changes,
    describe_difference,
    describe_run,
    name_group,
    order_groups,
)
from radq.report.tables import difference_table, left_out_table, metric_keys, metric_order, number, result_table

HEADLINES = 6  # guides, and pairs of guides, in words at the top; the tables have all


@dataclass(frozen=True)
class PageContent:
    """The results, plots and texts that a page shows."""

    runs: list[Run]
    changes: list[Change]
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
    jinja2 = require_package("jinja2", "report")
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
        facts=[(run.name, describe_run(run)) for run in content.runs],
        headlines=_first(describe_changes(content.changes), "guides") + _first(_in_words(content.pairs), "pairs"),
        change_table=change_table(content.changes),
        max_ratio=MAX_PERPLEXITY_RATIO,
        trusted_prompts=TRUSTED_PROMPTS,
        name_group=name_group,
        number=number,
        pairs=difference_table(content.pairs),
        not_compared=unique(f"{first} and {second}" for run in content.runs for first, second in _not_compared(run)),
        tables=[(group, result_table([result for result in results if result.group == group])) for group in groups],
        published_calls=published_calls(),
        left_out=left_out_table(results),
        curves=find_curves(list({(result.run, result.cell): result for result in results}.values())),
        samples_of=_samples_of,
        definitions=_definitions(results),
    )


def _first(sentences: Sequence[str], noun: str) -> list[str]:
    """The first sentences, and one that counts the others."""
    rest = len(sentences) - HEADLINES
    return [*sentences[:HEADLINES], *([f"… and {rest} more {noun} below."] if rest > 0 else [])]


def _in_words(pairs: Sequence[GuideDifference]) -> list[str]:
    """Compare pairs of guides in words, by the first metric of the first class of prompts."""
    known = [pair for pair in pairs if isfinite(pair.value)]
    if not known:
        return []
    group = order_groups([pair.group for pair in known])[0]
    metric = min((pair.metric for pair in known if pair.group == group), key=metric_order)
    return [_describe_pair(pair) for pair in known if (pair.group, pair.metric) == (group, metric)]


def _describe_pair(pair: GuideDifference) -> str:
    low, high = map(number, pair.perplexity_range)
    amount = f"{number(abs(pair.value))} {'more' if pair.value > 0 else 'less'} {pair.metric} than {pair.second}"
    found = describe_difference(Estimate(pair.value, pair.low, pair.high), pair.prompts)
    return f"{pair.first} has {amount} at equal perplexity ({low} to {high}), {name_group(pair.group)}: {found}."


def _not_compared(run: Run) -> list[tuple[str, str]]:
    """Find the pairs of guides that no metric compares."""
    known = {frozenset((pair.first, pair.second)) for pair in run.differences if isfinite(pair.value)}
    guides = unique(result.guide for result in run.results if not result.unguided)
    return [pair for pair in combinations(guides, 2) if frozenset(pair) not in known]


def _samples_of(prompt: PromptSamples, step: Step) -> list[Sample]:
    """The continuations of a prompt at one step of a curve, with its first seed."""
    first = step.results[0]
    return prompt.continuations.get((first.run, first.cell), [])


def _definitions(results: Sequence[Result]) -> list[tuple[str, str, list[str]]]:
    """The name, the description and the judges of each metric in the results."""
    keys = [metric_and_judge(key) for key in metric_keys(results)]
    return [
        (name, METRICS[name].description, [judge for metric, judge in keys if metric == name and judge])
        for name in unique(metric for metric, _ in keys)
    ]
