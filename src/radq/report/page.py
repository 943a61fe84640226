"""The page of a report: one html file that needs nothing else, neither network nor scripts.

Names and texts come from strangers: the template page.html.j2 escapes all of them, and the page's policy forbids
scripts and requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from radq.errors import require_package
from radq.evaluation.estimates import TRUSTED_PROMPTS
from radq.evaluation.metrics import METRICS
from radq.report.comparisons import (
    Comparison,
    comparison_table,
    describe_comparisons,
    explain_better,
    find_missing,
)
from radq.report.curves import Curve, Step, find_curves, find_unguided
from radq.report.plots import Plot, choose_colour
from radq.report.results import PromptSamples, Result, Run, Sample, metric_and_judge, published_calls, unique
from radq.report.summary import (
    MAX_PERPLEXITY_RATIO,
    Change,
    change_table,
    choose_step,
    describe_changes,
    describe_run,
    name_group,
    order_groups,
)
from radq.report.tables import left_out_table, metric_keys, number, result_table

HEADLINES = 6  # sentences about guides, and about comparisons of them, at the top; the tables have all


@dataclass(frozen=True)
class PageContent:
    """The results, plots and texts that a page shows."""

    runs: list[Run]
    changes: list[Change]
    comparisons: list[Comparison]
    tradeoffs: list[tuple[str, Plot]]  # class of prompts and plot
    comparison_plot: Plot | None
    samples: list[PromptSamples]
    published: bool
    notes: list[str]

    @property
    def results(self) -> list[Result]:
        return [result for run in self.runs for result in run.results]

    @property
    def other_pairs(self) -> int:
        """The number of comparisons in the runs that are not about our guide."""
        return sum(len(run.differences) for run in self.runs) - len(self.comparisons)


@dataclass(frozen=True)
class TextCard:
    """The texts of one guide at one strength, beside those of other guides."""

    title: str
    colour: str  # of the guide in plots; empty for the unguided base model
    samples: list[Sample]


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
    comparisons = describe_comparisons(content.comparisons)
    return template.render(
        vars(content),
        title=f"Report: {', '.join(run.name for run in content.runs)}",
        css=(folder / "page.css").read_text(encoding="utf-8"),
        facts=[(run.name, describe_run(run)) for run in content.runs],
        headlines=_first(comparisons, "comparisons") + _first(describe_changes(content.changes), "guides"),
        change_table=change_table(content.changes),
        max_ratio=MAX_PERPLEXITY_RATIO,
        trusted_prompts=TRUSTED_PROMPTS,
        name_group=name_group,
        number=number,
        comparison_table=comparison_table(content.comparisons),
        explanations=explain_better(content.comparisons),
        other_pairs=content.other_pairs,
        missing=[pair for run in content.runs for pair in find_missing(run)],
        tables=[(group, result_table([result for result in results if result.group == group])) for group in groups],
        published_calls=published_calls(),
        left_out=left_out_table(results),
        texts=[(prompt, *_show_texts(prompt, results)) for prompt in content.samples],
        definitions=_definitions(results),
    )


def _first(sentences: Sequence[str], noun: str) -> list[str]:
    """Return the first sentences, and one that counts the others."""
    rest = len(sentences) - HEADLINES
    return [*sentences[:HEADLINES], *([f"… and {rest} more {noun} below."] if rest > 0 else [])]


def _show_texts(prompt: PromptSamples, results: Sequence[Result]) -> tuple[list[TextCard], list[TextCard]]:
    """Collect the texts of all guides at the β that the changes are about, and those at all other β."""
    here = [result for result in results if result.group == prompt.group]
    here = here or list({(result.run, result.cell): result for result in results}.values())
    guides = unique(result.guide for result in results if not result.unguided)
    shown, rest = [], []
    for curve in find_curves(here):
        chosen = _choose_shown(here, curve)
        for step in curve.steps:
            (shown if step is chosen else rest).append(_make_card(prompt, curve, step, guides))
    return [card for card in shown if card.samples], [card for card in rest if card.samples]


def _choose_shown(results: Sequence[Result], curve: Curve) -> Step:
    unguided = find_unguided(results, curve)
    return curve.steps[-1] if unguided is None else choose_step(curve, unguided)


def _make_card(prompt: PromptSamples, curve: Curve, step: Step, guides: Sequence[str]) -> TextCard:
    """Make a card of the continuations of a prompt at one step of a curve, with its first seed."""
    first = step.results[0]
    title = f"{curve.label}, {step.title}" if step.title else curve.label
    colour = "" if curve.unguided else choose_colour(curve.guide, guides)
    return TextCard(title, colour, prompt.continuations.get((first.run, first.cell), []))


def _definitions(results: Sequence[Result]) -> list[tuple[str, str, list[str]]]:
    """List the name, the description and the judges of each metric in the results."""
    keys = [metric_and_judge(key) for key in metric_keys(results)]
    return [
        (name, METRICS[name].description, [judge for metric, judge in keys if metric == name and judge])
        for name in unique(metric for metric, _ in keys)
    ]
