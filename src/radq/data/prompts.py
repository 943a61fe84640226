"""Prompts from files: RealToxicityPrompts, sentiment prompts, columns, lines, or lines with continuations.

prompts = read_prompts("rtp.jsonl.gz", max_toxicity=0.5, limit=1000, seed=0)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from radq.data.tables import COMPRESSIONS, FORMATS, in_row, read_table
from radq.errors import DataError, OptionError
from radq.files import read_numbered_lines
from radq.settings import read_number

WANTED = '"prompt": {"text": …}, "prompt": "…" or "text": "…"'


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and the name of the group of prompts it belongs to, such as "neutral"."""

    text: str
    group: str


def read_prompts(
    source: str | Path,
    group: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
    max_toxicity: float | None = None,
) -> list[Prompt]:
    """Read the prompts of a file, in its order and without trailing whitespace.

    Args:
        source: csv, tsv, jsonl or parquet, also compressed, or a hub data set; any other file has one prompt per line.
        group: name of the group of these prompts; by default the file's name without endings.
        limit: largest number of prompts: the first ones, or a random choice if there is a seed.
        seed: seed of the random choice.
        max_toxicity: keep only prompts whose `toxicity` is below this number; prompts without a toxicity are dropped.
    """
    if limit is not None and limit < 1:
        raise OptionError(f"limit must be at least 1, got {limit}.", "give a larger limit, or none.")
    path = Path(source)
    is_table = not path.is_file() or {suffix.lower() for suffix in path.suffixes} & {*FORMATS, *COMPRESSIONS}
    rows = list(_read_rows(source) if is_table else _read_lines(path))
    if not rows:
        raise DataError(f"{source}: there are no prompts.", "give a file with prompts.")
    if max_toxicity is not None:
        if all(isnan(toxicity) for _, toxicity in rows):
            raise DataError(f"{source} has no toxicity to filter by.", "leave max_toxicity out.")
        rows = [(text, toxicity) for text, toxicity in rows if toxicity < max_toxicity]
        if not rows:
            raise DataError(f"{source}: no prompt has a toxicity below {max_toxicity}.", "raise max_toxicity.")
    if limit is not None and seed is not None and limit < len(rows):
        chosen = np.random.default_rng(seed).choice(len(rows), size=limit, replace=False)
        rows = [rows[n] for n in np.sort(chosen)]
    group = path.name.split(".")[0] if group is None else group
    return [Prompt(text, group) for text, _ in rows[:limit]]


def _read_lines(path: Path) -> Iterator[tuple[str, float]]:
    """Read one prompt per line, which has no toxicity; blank lines are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{str(path)!r} is not a text file: {error}.", "give a text file with one prompt per line."
        ) from error
    return ((line.rstrip(), np.nan) for line in lines if line.strip())


def _read_rows(source: str | Path) -> Iterator[tuple[str, float]]:
    """Read the prompts of a table with their toxicity, which is NaN where there is none."""
    for table in read_table(source):
        column = next((name for name in ("prompt", "text") if name in table.columns), None)
        if column is None:
            names = ", ".join(map(str, table.columns)) or "none"
            raise DataError(f"{source} has no prompts, but the fields {names}.", f"give prompts as {WANTED}.")
        scores = table["toxicity"] if "toxicity" in table.columns else [None] * len(table)
        for row, prompt, score in zip(table.index, table[column], scores, strict=True):
            with in_row(source, row):
                read = _read_prompt(prompt, score)
            yield read


def _read_prompt(prompt: Any, score: Any) -> tuple[str, float]:
    text, problem = prompt, f"is {prompt!r}"
    if isinstance(prompt, dict):
        text, score = prompt.get("text"), prompt.get("toxicity")
        problem = f"has the fields {', '.join(map(str, prompt))}"
    if not isinstance(text, str):
        raise DataError(f"the prompt {problem}.", f"give prompts as {WANTED}.")
    toxicity = read_number(score)
    if isnan(toxicity) and not (score is None or score == "" or score != score):
        raise DataError(f"toxicity must be a number or empty, got {score!r}.", "change this row.")
    return text.rstrip(), toxicity


# --- generations ---

LAYOUTS = (("text", "continuations"), ("prompt", "generations"))  # fields of a line
LINE_FORMATS = (
    'give "text" and "continuations" as radq eval writes them, or "prompt" and "generations" as DExperts and RAD do.'
)


@dataclass
class GeneratedTexts:
    """The prompts of one cell and class, each with its continuations."""

    prompts: list[str] = field(default_factory=list)
    continuations: list[list[str]] = field(default_factory=list)


def read_generations(files: Sequence[Path]) -> dict[tuple[str, str], GeneratedTexts]:
    """Read generations by cell and class of prompts, in the order of the files.

    A line without a cell belongs to the cell with the file's name, one without a class to the class "all".
    """
    cells: dict[tuple[str, str], GeneratedTexts] = {}
    for file in files:
        if not file.is_file():
            raise DataError(f"there is no file {str(file)!r}.", "give a jsonl file with generations.")
        for number, row in read_numbered_lines(file):
            prompt, continuations = _read_line(f"{file}, line {number}", row)
            key = str(row.get("cell") or file.stem), str(row.get("group") or "all")
            texts = cells.setdefault(key, GeneratedTexts())
            texts.prompts.append(prompt)
            texts.continuations.append(continuations)
    if not cells:
        raise DataError(f"there are no generations in {', '.join(map(str, files))}.", "give a jsonl file with some.")
    return cells


def _read_line(place: str, row: Any) -> tuple[str, list[str]]:
    """Take the prompt and its continuations from a line."""
    fields = ", ".join(map(str, row)) if isinstance(row, dict) else repr(row)
    names = next((pair for pair in LAYOUTS if isinstance(row, dict) and pair[1] in row), None)
    if names is None:
        raise DataError(f"{place} has no generations, but {fields}.", LINE_FORMATS)
    prompt, listed = row.get(names[0]), row[names[1]] or []
    texts = [prompt, *(listed if isinstance(listed, list) else [None])]
    plain: list[Any] = [text.get("text") if isinstance(text, dict) else text for text in texts]
    if not all(isinstance(text, str) for text in plain):
        raise DataError(f"{place} has {fields}, but not as texts.", LINE_FORMATS)
    return plain[0], plain[1:]
