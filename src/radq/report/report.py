"""A report: run folders in; plots, tables and one self-contained page out.

write_report([Path("runs/detox")]).page
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from radq.errors import OptionError
from radq.files import whole_folder
from radq.report.curves import unique
from radq.report.page import Content, order_groups, write_page
from radq.report.plots import Plot, plot_differences, plot_tradeoff
from radq.report.published import BASES, TOXICITY_JUDGES, PublishedCurve, find_named, find_published
from radq.report.results import Result, Run, metric_and_judge, read_runs, read_samples
from radq.report.tables import result_table, to_csv, to_latex, to_markdown


@dataclass(frozen=True)
class Report:
    """What was written, and what its reader should know."""

    page: Path
    plots: list[Path]
    tables: list[Path]
    guides: list[str]
    cells: int
    notes: list[str]


def write_report(folders: Sequence[Path], out: Path | None = None, published: bool = False) -> Report:
    """report.html, plots/ and tables/ in `out`, by default in the run's own folder.

    Args:
        folders: runs of `radq eval`; guides of several come into one report.
        published: draw the paper's numbers beside them.
    """
    if out is None and len(folders) > 1:
        raise OptionError("a report of several runs has no folder.", "name one with --out.")
    runs = read_runs(folders)
    target = out or folders[0]
    samples = read_samples(runs)
    results = [result for run in runs for result in run.results]
    drawn = _Published(runs) if published else None
    tradeoffs = _plot_tradeoffs(results, drawn)
    differences = plot_differences("differences", [pair for run in runs for pair in run.differences])
    notes = [note for run in runs for note in run.notes]
    if drawn is not None and not drawn.found:
        notes.append("the paper has no numbers for the metrics and prompts of this report.")
    page = write_page(Content(runs, tradeoffs, differences, samples, published, notes))
    plots = [plot for _, plot in tradeoffs] + ([differences] if differences else [])
    written = {"plots": _plot_files(plots), "tables": _table_files(results)}
    for name, files in written.items():
        _write(target / name, files)
    _write(target, {"report.html": page.encode()})  # last: it says that the rest is there
    places = {name: [target / name / file for file in files] for name, files in written.items()}
    guides = unique(result.guide for result in results)
    return Report(target / "report.html", **places, guides=guides, cells=len(_cells(results)), notes=notes)


def _cells(results: Sequence[Result]) -> set[tuple[str, str]]:
    return {(result.run, result.cell) for result in results}


def _plot_tradeoffs(results: list[Result], published: "_Published | None") -> list[tuple[str, Plot]]:
    groups = order_groups(unique(result.group for result in results))
    names = _file_names(groups)
    plots = []
    for group, name in zip(groups, names, strict=True):
        find = partial(published, group) if published is not None else lambda attribute, fluency: []
        plot = plot_tradeoff(name, group, [result for result in results if result.group == group], find)
        plots += [(group, plot)] if plot is not None else []
    return plots


def _file_names(groups: Sequence[str]) -> list[str]:
    """A class of prompts may be called anything; a file may not."""
    plain = [re.sub(r"[^a-z0-9]+", "-", group.lower()).strip("-")[:40] for group in groups]
    return [
        f"tradeoff-{name or n}" if plain.count(name) == 1 else f"tradeoff-{name}-{n}" for n, name in enumerate(plain)
    ]


class _Published:
    """Finds the paper's curves that come nearest to what runs did: base model, judge and top-k."""

    def __init__(self, runs: Sequence[Run]):
        configs = [run.config or "" for run in runs]
        self.base = find_named(BASES, " ".join(map(_base, configs)))
        self.judges = " ".join(configs)  # where a metric does not name its judge
        self.top_ks = {result.top_k for run in runs for result in run.results if result.top_k is not None}
        self.found = False

    def __call__(self, group: str, attribute: str, fluency: str) -> list[PublishedCurve]:
        metric, judge = metric_and_judge(attribute)
        named = find_named(TOXICITY_JUDGES, judge or self.judges)
        curves = find_published(metric, metric_and_judge(fluency)[0], group, self.base, named, self.top_ks)
        self.found = self.found or bool(curves)
        return curves


def _base(config: str) -> str:
    try:
        settings = yaml.safe_load(config)
    except yaml.YAMLError:
        return ""
    return str(settings.get("base", "")) if isinstance(settings, dict) else ""


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
        result_table([result for result in results if result.group == group], f"{group} prompts") for group in groups
    ]
    return {
        "results.md": "\n".join(map(to_markdown, tables)).encode(),
        "results.csv": to_csv(results).encode(),
        "results.tex": "\n".join(map(to_latex, tables)).encode(),
    }


def _write(folder: Path, files: dict[str, bytes]) -> None:
    with whole_folder(folder) as temporary:
        for name, data in files.items():
            (temporary / name).write_bytes(data)
