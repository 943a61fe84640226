"""A report of run folders: plots, tables and one self-contained page.

write_report([Path("runs/detox")]).page
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from radq.errors import OptionError
from radq.files import atomic_folder
from radq.report.comparisons import compare_with_others, describe_comparisons
from radq.report.page import PageContent, render_page
from radq.report.plots import Plot, plot_comparisons, plot_tradeoff
from radq.report.results import (
    BASES,
    TOXICITY_JUDGES,
    PublishedCurve,
    Result,
    Run,
    find_named,
    find_published,
    metric_and_judge,
    read_runs,
    read_samples,
    unique,
)
from radq.report.summary import Change, describe_run, find_changes, name_group, order_groups, warn_of_few_prompts
from radq.report.tables import result_table, to_csv, to_latex, to_markdown


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
        progress: show a progress bar.
    """
    if out is None and len(folders) > 1:
        raise OptionError("a report of several runs needs a folder of its own.", "name it with --out.")
    runs = read_runs(folders)
    target = out or folders[0]
    samples = read_samples(runs)
    results = [result for run in runs for result in run.results]
    drawn = _Published(runs) if published else None
    tradeoffs = _plot_tradeoffs(results, drawn, progress)
    guides = unique(result.guide for result in results)
    comparisons = [one for run in runs for one in compare_with_others(run)]
    guided = unique(result.guide for result in results if not result.unguided)
    drawn_comparisons = plot_comparisons("differences", comparisons, guided)
    changes = [change for run in runs for change in find_changes(run)]
    notes = [note for run in runs for note in (*run.notes, *warn_of_few_prompts(run))]
    if drawn is not None and not drawn.found:
        notes.append("the paper has no numbers for the metrics and prompts of this report.")
    page = render_page(PageContent(runs, changes, comparisons, tradeoffs, drawn_comparisons, samples, published, notes))
    plots = [plot for _, plot in tradeoffs] + ([drawn_comparisons] if drawn_comparisons else [])
    written = {"plots": _plot_files(plots), "tables": _table_files(results)}
    for name, files in written.items():
        _write(target / name, files)
    _write(target, {"report.html": page.encode()})  # last, so that all other files are there when the page is
    places = {name: [target / name / file for file in files] for name, files in written.items()}
    return Report(
        target / "report.html",
        **places,
        guides=guides,
        cells=len(_cells(results)),
        runs={run.name: dict(describe_run(run)) for run in runs},
        changes=changes,
        comparisons=describe_comparisons(comparisons),
        notes=notes,
    )


def _cells(results: Sequence[Result]) -> set[tuple[str, str]]:
    return {(result.run, result.cell) for result in results}


def _plot_tradeoffs(results: list[Result], published: "_Published | None", progress: bool) -> list[tuple[str, Plot]]:
    groups = order_groups(unique(result.group for result in results))
    names = _file_names(groups)
    plots = []
    bar = tqdm(groups, desc="plots", unit="class", leave=False, disable=not progress)
    for group, name in zip(bar, names, strict=True):
        find = partial(published, group) if published is not None else lambda attribute, fluency: []
        plot = plot_tradeoff(name, group, [result for result in results if result.group == group], find)
        plots += [(group, plot)] if plot is not None else []
    return plots


def _file_names(groups: Sequence[str]) -> list[str]:
    """Make file names from the names of classes, which may hold any characters."""
    plain = [re.sub(r"[^a-z0-9]+", "-", group.lower()).strip("-")[:40] for group in groups]
    return [
        f"tradeoff-{name or n}" if plain.count(name) == 1 else f"tradeoff-{name}-{n}" for n, name in enumerate(plain)
    ]


class _Published:
    """Finds the paper's curves with the base model, judge and top-k of the runs, or the nearest that the paper has."""

    def __init__(self, runs: Sequence[Run]):
        self.base = find_named(BASES, " ".join(str(run.settings.get("base", "")) for run in runs))
        self.judges = " ".join(run.config or "" for run in runs)  # searched where a metric does not name its judge
        self.top_ks = {result.top_k for run in runs for result in run.results if result.top_k is not None}
        self.found = False

    def __call__(self, group: str, attribute: str, fluency: str) -> list[PublishedCurve]:
        metric, judge = metric_and_judge(attribute)
        named = find_named(TOXICITY_JUDGES, judge or self.judges)
        curves = find_published(metric, metric_and_judge(fluency)[0], group, self.base, named, self.top_ks)
        self.found = self.found or bool(curves)
        return curves


# --- files ---


def _plot_files(plots: Sequence[Plot]) -> dict[str, bytes]:
    files = {}
    for plot in plots:
        files[f"{plot.name}.svg"] = plot.svg.encode()
        files[f"{plot.name}.png"] = plot.png
    return files


def _table_files(results: list[Result]) -> dict[str, bytes]:
    groups = order_groups(unique(result.group for result in results))
    tables = [
        result_table([result for result in results if result.group == group], name_group(group)) for group in groups
    ]
    return {
        "results.md": "\n".join(map(to_markdown, tables)).encode(),
        "results.csv": to_csv(results).encode(),
        "results.tex": "\n".join(map(to_latex, tables)).encode(),
    }


def _write(folder: Path, files: dict[str, bytes]) -> None:
    with atomic_folder(folder) as temporary:
        for name, data in files.items():
            (temporary / name).write_bytes(data)
