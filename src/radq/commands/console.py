"""Output of the commands: tables for people, JSON for machines."""

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from radq.commands.threads import STARTED, CoreTimes, describe_contention

if TYPE_CHECKING:
    from rich.table import Table


WIDEST = 10_000  # characters in a line of a table


def console() -> Console:
    return Console(highlight=False)


def announce(work: str, as_json: bool) -> None:
    """Say on standard error what the next seconds are spent on, in one process only and not beside JSON.

    A second line says if fewer threads would be faster.
    """
    if as_json or not is_first_process():
        return
    note = describe_contention(STARTED, CoreTimes.read())
    print(f"{work} …", *filter(None, [note]), sep="\n", file=sys.stderr, flush=True)


def is_first_process() -> bool:
    """Whether this process is the only one, or the first of several that a launcher started."""
    return int(os.environ.get("RANK", 0)) == 0


def print_json(document: Any) -> None:
    """Print a document as JSON. NaN and infinity, which JSON does not have, become null."""
    json.dump(_without_nan(document), sys.stdout, ensure_ascii=False, indent=2, allow_nan=False)
    print()


def _without_nan(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: _without_nan(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [_without_nan(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def make_table(*columns: str) -> "Table":
    """A table of numbers: all columns are aligned to the right."""
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> None:
    """Print a table whose first `words` columns hold words, and whose other columns hold numbers.

    No word or number is cut: in a narrow terminal entries wrap between words, and where that is not enough, or where
    there is no terminal, the table is as wide as it needs to be.
    """
    from rich.cells import cell_len
    from rich.measure import Measurement
    from rich.table import Table

    table = Table()
    for number, name in enumerate(header):
        longest_word = max(cell_len(word) for row in (header, *rows) for word in row[number].split() or [""])
        table.add_column(Text(name), justify="left" if number < words else "right", min_width=longest_word)
    for row in rows:
        table.add_row(*map(Text, row))
    screen = console()
    needed = Measurement.get(screen, screen.options.update(max_width=WIDEST), table)
    screen.width = max(screen.width, needed.minimum if screen.is_terminal else needed.maximum)
    screen.print(table)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print named facts, a line each."""
    for name, text in facts:
        print(f"{name}: {text}")


def print_metrics(rows: list[dict[str, Any]]) -> None:
    """Print lines of metrics.jsonl as a table with a row per cell of the sweep and class of prompts."""
    from radq.report.curves import count_group

    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    lines = []
    for row in rows:
        values = (row["metrics"][name]["value"] for name in names)
        numbers = ("-" if value is None else f"{value:.4g}" for value in values)
        lines.append([row["cell"], count_group(row["group"], row.get("prompts")), *numbers])
    print_table(["cell", "prompts", *(name.replace("[", "\n[") for name in names)], lines, words=2)
