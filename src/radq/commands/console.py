"""Output of the commands: coloured tokens and tables for people, JSON for machines."""

import json
import os
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from radq.commands.threads import STARTED, CoreTimes, describe_contention

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedTokenizerBase


LOW, HIGH = (0, 80, 180), (190, 95, 0)  # red, green and blue of the colours for low and high values


def console() -> Console:
    return Console(highlight=False)


def coloured(tokens: Iterable[tuple[str, float]], low: float, high: float) -> Text:
    """Colour the background of tokens by their values: blue for low, none in the middle, orange for high.

    Blue and orange look different to colour-blind people too, and say neither good nor bad.
    """
    text = Text()
    for token, value in tokens:
        share = 0.5 if high <= low else min(max((value - low) / (high - low), 0.0), 1.0)
        strength = abs(2 * share - 1)
        colour = [int(strength * part) for part in (LOW if share < 0.5 else HIGH)]
        text.append(token, style="on #{:02x}{:02x}{:02x}".format(*colour) if strength > 0.05 else "")
    return text


def legend(low: float, high: float, meaning: str) -> Text:
    """One line that shows the colours of the lowest and the highest value and says what the values are."""
    return coloured([(" low ", low), (" to ", (low + high) / 2), (" high ", high)], low, high) + f": {meaning}"


def split_tokens(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> list[str]:
    """The piece of text that each token adds, with its spaces.

    Special tokens add nothing. If a character consists of several tokens, the last of them adds it.
    """
    texts = [str(tokenizer.decode(ids[:n], skip_special_tokens=True)).rstrip("\ufffd") for n in range(len(ids) + 1)]
    return [after[len(before) :] for before, after in pairwise(texts)]


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
    json.dump(document, sys.stdout, ensure_ascii=False, indent=2)
    print()


def make_table(*columns: str) -> "Table":
    """A table of numbers: all columns are aligned to the right."""
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_metrics(rows: list[dict[str, Any]]) -> None:
    """Print lines of metrics.jsonl as a table with a row per cell of the sweep and class of prompts."""
    from rich.markup import escape
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    table = Table()
    for column in ("cell", "prompts"):
        table.add_column(column, no_wrap=True)
    for name in names:
        table.add_column(escape(name.replace("[", "\n[")), justify="right")
    for row in rows:
        values = (row["metrics"][name]["value"] for name in names)
        cells = ("-" if value is None else f"{value:.4g}" for value in values)
        table.add_row(escape(row["cell"]), escape(row["group"]), *cells)
    console().print(table)
