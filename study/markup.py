"""Markdown and figures of the pages of a study."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from radq.files import whole_folder
from radq.report.plots import Plot


def item(mark: str, text: str) -> str:
    return wrapped(f"{mark} {text}", indent=" " * (len(mark) + 1))


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *rows))


def plain(text: str) -> str:
    """Text on one line that markdown leaves as it is."""
    return re.sub(r"([\\`*_|<])", r"\\\1", " ".join(text.split()))


def write_figures(folder: Path, plots: Sequence[Plot]) -> None:
    """Write the figures and delete those of an earlier study."""
    with whole_folder(folder) as temporary:
        for plot in plots:
            (temporary / f"{plot.name}.svg").write_text(plot.themed, encoding="utf-8")
    for file in folder.glob("*.svg"):
        if file.stem not in {plot.name for plot in plots}:
            file.unlink()
