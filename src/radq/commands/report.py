"""radq report RUN"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass
class Arguments:
    """Plots, tables and one page to open in a browser, from what radq eval has measured."""

    runs: Annotated[tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="RUN [RUN …]")]
    """Folders that radq eval has written; the guides of several come into one report."""
    published: bool = False
    """Draw the paper's published numbers beside the run's own."""
    out: Path | None = None
    """Folder to write report.html, plots and tables into; by default the run's own."""
    json: bool = False
    """Print JSON."""


def run(arguments: Arguments) -> None:
    from dataclasses import asdict

    from radq.commands.console import print_json
    from radq.report.report import write_report

    report = write_report(arguments.runs, arguments.out, arguments.published)
    if arguments.json:
        document = asdict(report)
        for name in ("plots", "tables"):
            document[name] = list(map(str, document[name]))
        print_json(document | {"page": str(report.page)})
        return
    print(f"report of {report.cells} cells of {', '.join(report.guides)} → {report.page}")
    for file in (*report.plots, *report.tables):
        print(f"  {file}")
    for note in report.notes:
        print(f"note: {note}")
