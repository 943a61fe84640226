"""radq report RUN"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from radq.commands.console import print_facts, print_json


@dataclass
class Arguments:
    """Write plots, tables and one page for the browser from the results of radq eval."""

    runs: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="RUN [RUN …]")]
    """Folders that radq eval has written; a report of several folders shows all their guides."""
    published: bool = False
    """Draw the paper's published numbers beside those of the run."""
    out: Path | None = None
    """Folder to write report.html, plots and tables into; by default the run folder."""
    json: bool = False
    """Print the names of the written files, the facts about the runs, the changes by guides and how guides compare with
    each other as JSON."""


def run(arguments: Arguments) -> None:
    from radq.report.curves import describe_changes
    from radq.report.write import write_report

    report = write_report(arguments.runs, arguments.out, arguments.published, progress=not arguments.json)
    if arguments.json:
        print_json(asdict(report) | {"page": report.page})
        return
    for name, facts in report.runs.items():
        print_facts([("run", name), *facts.items()])
    for sentence in (*report.comparisons, *describe_changes(report.changes)):
        print(sentence)
    print(f"report of {report.cells} cells of {', '.join(report.guides)} → {report.page}")
    for file in (*report.plots, *report.tables):
        print(f"  {file}")
    for note in report.notes:
        print(f"note: {note}")
