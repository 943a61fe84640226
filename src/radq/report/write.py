"""A report of run folders: plots, tables and one self-contained page.

write_report([Path("runs/detox")]).page

The page is one html file that needs nothing else, neither network nor scripts. Names and texts come from strangers: the
template page.html.j2 escapes all of them, and the page's policy forbids scripts and requests. published.csv holds every
number of the paper's tables, under radq's names of metrics, as curves to be drawn beside those of a run.
"""

import csv
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any

from tqdm import tqdm

from radq.errors import OptionError, require_package
from radq.evaluation.estimates import TRUSTED_PROMPTS
from radq.evaluation.metrics import METRICS, metric_and_judge
from radq.files import atomic_folder
from radq.report.comparisons import (
    compare_with_others,
    comparison_table,
    describe_comparisons,
    explain_better,
    find_missing,
)
from radq.report.curves import (
    MAX_PERPLEXITY_RATIO,
    Change,
    change_table,
    describe_changes,
    describe_run,
    find_changes,
    find_curves,
    name_group,
    split_groups,
    warn_of_few_prompts,
)
from radq.report.plots import Plot, PublishedCurve, choose_colour, plot_comparisons, plot_tradeoff
from radq.report.results import NAN, Comparison, PromptSamples, Result, Run, Sample, read_runs, read_samples, unique
from radq.report.tables import left_out_table, metric_keys, number, result_table, to_csv, to_latex, to_markdown

BASES = ("GPT-2-Large", "LLaMA-2-7b", "LLaMA-2-13b")
TOXICITY_JUDGES = ("Perspective", "ToxicityModel")
HEADLINES = 6  # sentences about guides, and about comparisons of them, at the top of the page; the tables have all


@dataclass(frozen=True)
class Report:
    """The files of a report, and notes for its reader."""

    page: Path
    plots: list[Path]
    tables: list[Path]
    guides: list[str]
    cells: int
    runs: dict[str, dict[str, str]]  # the base model, judges and prompts of each run, in words
    changes: list[Change]  # from the unguided base model
    comparisons: list[str]  # of our guide with others at equal perplexity and KL, in words
    notes: list[str]


def write_report(
    folders: Sequence[Path], out: Path | None = None, published: bool = False, progress: bool = False
) -> Report:
    """Write report.html, plots/ and tables/ into `out`, by default into the run folder.

    Args:
        folders: run folders of `radq eval`; a report of several shows all their guides.
        published: draw the paper's numbers beside those of the runs.
    """
    if out is None and len(folders) > 1:
        raise OptionError("a report of several runs needs a folder of its own.", "name it with --out.")
    runs = read_runs(folders)
    target = out or folders[0]
    samples = read_samples(runs)
    results = [result for run in runs for result in run.results]
    groups = split_groups(results)
    from_paper: list[PublishedCurve] = []
    tradeoffs = _plot_tradeoffs(groups, runs if published else [], from_paper, progress)
    comparisons = [comparison for run in runs for comparison in compare_with_others(run)]
    guided = unique(result.guide for result in results if not result.unguided)
    forest = plot_comparisons("differences", comparisons, guided)
    changes = [change for run in runs for change in find_changes(run)]
    notes = [note for run in runs for note in (*run.notes, *warn_of_few_prompts(run))]
    if published and not from_paper:
        notes.append("the paper has no numbers for the metrics and prompts of this report.")
    tables = {group: result_table(cells, name_group(group)) for group, cells in groups.items()}
    page = _render_page(
        runs,
        comparisons,
        changes,
        tradeoffs=tradeoffs,
        comparison_plot=forest,
        tables=tables.items(),
        texts=[(prompt, *_show_texts(prompt, results, guided)) for prompt in samples],
        notes=notes,
        published=published,
    )
    plots = [plot for _, plot in tradeoffs] + ([forest] if forest else [])
    contents: dict[str, dict[str, str | bytes]] = {
        "plots": {f"{plot.name}.{kind}": getattr(plot, kind) for plot in plots for kind in ("svg", "png")},
        "tables": {
            "results.md": "\n".join(map(to_markdown, tables.values())),
            "results.csv": to_csv(results),
            "results.tex": "\n".join(map(to_latex, tables.values())),
        },
    }
    for name, content in contents.items():
        _write(target / name, content)
    _write(target, {"report.html": page})  # last, so that all other files are there when the page is
    return Report(
        target / "report.html",
        **{name: [target / name / file for file in content] for name, content in contents.items()},
        guides=unique(result.guide for result in results),
        cells=len({(result.run, result.cell) for result in results}),
        runs={run.name: dict(describe_run(run)) for run in runs},
        changes=changes,
        comparisons=describe_comparisons(comparisons),
        notes=notes,
    )


def _write(folder: Path, contents: dict[str, str | bytes]) -> None:
    with atomic_folder(folder) as temporary:
        for name, data in contents.items():
            (temporary / name).write_bytes(data.encode() if isinstance(data, str) else data)


# --- plots ---


def _plot_tradeoffs(
    groups: dict[str, list[Result]], published: Sequence[Run], from_paper: list[PublishedCurve], progress: bool
) -> list[tuple[str, Plot]]:
    """Plot each class of prompts. The paper's curves for `published` runs are drawn, and added to `from_paper`.

    They are those with the base model, judge and top-k of the runs, or the nearest that the paper has.
    """
    base = find_named(BASES, " ".join(str(run.settings.get("base", "")) for run in published))
    judges = " ".join(run.config or "" for run in published)  # searched where a metric does not name its judge
    top_ks = {result.top_k for run in published for result in run.results if result.top_k is not None}

    def find(group: str, attribute: str, fluency: str) -> list[PublishedCurve]:
        if not published:
            return []
        metric, judge = metric_and_judge(attribute)
        named = find_named(TOXICITY_JUDGES, judge or judges)
        curves = find_published(metric, metric_and_judge(fluency)[0], group, base, named, top_ks)
        from_paper.extend(curves)
        return curves

    bar = tqdm(groups.items(), desc="plots", unit="class", leave=False, disable=not progress)
    names = _name_files(list(groups))
    plots = [
        (group, plot_tradeoff(name, group, cells, partial(find, group)))
        for (group, cells), name in zip(bar, names, strict=True)
    ]
    return [(group, plot) for group, plot in plots if plot is not None]


def _name_files(groups: Sequence[str]) -> list[str]:
    """Make file names from the names of classes, which may hold any characters."""
    plain = [re.sub(r"[^a-z0-9]+", "-", group.lower()).strip("-")[:40] for group in groups]
    return [
        f"tradeoff-{name or n}" if plain.count(name) == 1 else f"tradeoff-{name}-{n}" for n, name in enumerate(plain)
    ]


# --- the page ---


@dataclass(frozen=True)
class TextCard:
    """The texts of one guide at one strength, beside those of other guides."""

    title: str
    colour: str  # of the guide in plots; empty for the unguided base model
    samples: list[Sample]


def _render_page(runs: list[Run], comparisons: list[Comparison], changes: list[Change], **content: Any) -> str:
    """Render the page as html. `content` is shown as it is, by the names that the template knows."""
    jinja2 = require_package("jinja2", "report")
    folder = files("radq.report")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))
    results = [result for run in runs for result in run.results]
    sentences = describe_comparisons(comparisons)
    return template.render(
        content,
        css=(folder / "page.css").read_text(encoding="utf-8"),
        title=f"Report: {', '.join(run.name for run in runs)}",
        runs=runs,
        facts=[(run.name, describe_run(run)) for run in runs],
        headlines=_first(sentences, "comparisons") + _first(describe_changes(changes), "guides"),
        change_table=change_table(changes),
        comparison_table=comparison_table(comparisons),
        explanations=explain_better(comparisons),
        other_pairs=sum(len(run.differences) for run in runs) - len(comparisons),
        missing=[pair for run in runs for pair in find_missing(run)],
        left_out=left_out_table(results),
        definitions=_define_metrics(results),
        max_ratio=MAX_PERPLEXITY_RATIO,
        trusted_prompts=TRUSTED_PROMPTS,
        name_group=name_group,
        number=number,
        published_calls=published_calls(),
    )


def _first(sentences: Sequence[str], noun: str) -> list[str]:
    """Return the first sentences, and one that counts the others."""
    rest = len(sentences) - HEADLINES
    return [*sentences[:HEADLINES], *([f"… and {rest} more {noun} below."] if rest > 0 else [])]


def _show_texts(
    prompt: PromptSamples, results: Sequence[Result], guides: Sequence[str]
) -> tuple[list[TextCard], list[TextCard]]:
    """Collect the texts of all guides at the β that the changes are about, and those at all other β, by first seeds."""
    here = split_groups(results).get(prompt.group)
    here = here or list({(result.run, result.cell): result for result in results}.values())
    shown, rest = [], []
    for curve in find_curves(here):
        for step in curve.steps:
            title = f"{curve.label}, {step.title}" if step.title else curve.label
            colour = "" if curve.unguided else choose_colour(curve.guide, guides)
            samples = prompt.continuations.get((step.results[0].run, step.results[0].cell), [])
            if samples:
                (shown if step is curve.shown else rest).append(TextCard(title, colour, samples))
    return shown, rest


def _define_metrics(results: Sequence[Result]) -> list[tuple[str, str, list[str]]]:
    """List the name, the description and the judges of each metric in the results."""
    keys = [metric_and_judge(key) for key in metric_keys(results)]
    return [
        (name, METRICS[name].description, [judge for metric, judge in keys if metric == name and judge])
        for name in unique(metric for metric, _ in keys)
    ]


# --- the numbers of the paper ---


def find_published(
    metric: str,
    fluency: str,
    group: str,
    base: str = "GPT-2-Large",
    judge: str = "Perspective",
    top_ks: Collection[int] = (),
) -> list[PublishedCurve]:
    """Find the paper's curves of a metric against perplexity or MAUVE.

    Where the paper has curves for one of `top_ks`, only these are returned. `judge` chooses among the two judges of
    toxicity; sentiment has one judge. The paper's toxicity is that of nontoxic prompts, and is returned for any class;
    its positive rates are returned for classes with the paper's names, such as "neutral".
    """
    rows = [row for row in _published_rows() if row["metric"] == metric and row["base"] == base]
    if metric == "positive_rate":
        rows = [row for row in rows if row["prompts"] in group.lower()]
    else:
        rows = [row for row in rows if row["judge"] == judge]
    rows = [row for row in rows if row["top_k"] in top_ks] or rows
    fluencies = {_setting(row): float(row["value"]) for row in _published_rows() if row["metric"] == fluency}
    scale = 0.01 if metric == "positive_rate" else 1.0  # printed as percentages in the paper
    curves: dict[tuple[str, int | None, str], list[tuple[float, float, float]]] = {}
    for row in rows:
        point = (float(row["beta"]), fluencies.get(_setting(row), NAN), scale * float(row["value"]))
        if all(map(isfinite, point)):
            curves.setdefault((row["method"], row["top_k"], row["judge"]), []).append(point)
    return [PublishedCurve(m, k, base, j, tuple(sorted(points))) for (m, k, j), points in curves.items()]


def find_named(names: Sequence[str], text: str) -> str:
    """Find the first of the paper's names that a text mentions, else return the first name."""
    plain = text.lower().replace("-hf", "")
    return next((name for name in names if name.lower() in plain), names[0])


def published_calls() -> str:
    """List the calls of experts per generated token, as the paper counts them."""
    rows = [row for row in _published_rows() if row["metric"] == "calls"]
    return ", ".join(f"{row['method']} {'k' if row['value'] == 'nan' else row['value']}" for row in rows)


def _setting(row: dict[str, Any]) -> tuple[Any, ...]:
    """The columns that identify a run of the paper. Judges and classes of prompts share its perplexity and MAUVE."""
    return tuple(row[name] for name in ("task", "base", "method", "top_k", "beta"))


@cache
def _published_rows() -> list[dict[str, Any]]:
    text = (files("radq.report") / "published.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return [row | {"top_k": int(row["top_k"]) if row["top_k"] else None} for row in rows]
