"""Prompts from files: RealToxicityPrompts, sentiment prompts, columns, lines, or lines with continuations.

prompts = read_prompts("rtp.jsonl.gz", max_toxicity=0.5, limit=1000, seed=0)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from radq.data.tables import COMPRESSIONS, FORMATS, read_table
from radq.errors import DataError, OptionError
from radq.files import read_numbered_lines

WANTED = '"prompt": {"text": …}, "prompt": "…" or "text": "…"'


@dataclass(frozen=True)
class Prompt:
    """A text to continue, and the name of the group of prompts it belongs to, such as "neutral"."""

    text: str
    group: str


@dataclass(frozen=True)
class _Row:
    text: str
    toxicity: float | None  # None if the file has no toxicity for this prompt


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
    rows = list(_read_plain(Path(source)) if _is_plain(Path(source)) else _read_rows(source))
    if not rows:
        raise DataError(f"{source}: there are no prompts.", "give a file with prompts.")
    if max_toxicity is not None:
        if all(row.toxicity is None for row in rows):
            raise DataError(f"{source} has no toxicity to filter by.", "leave max_toxicity out.")
        rows = [row for row in rows if row.toxicity is not None and row.toxicity < max_toxicity]
        if not rows:
            raise DataError(f"{source}: no prompt has a toxicity below {max_toxicity}.", "raise max_toxicity.")
    if limit is not None and seed is not None and limit < len(rows):
        chosen = np.random.default_rng(seed).choice(len(rows), size=limit, replace=False)
        rows = [rows[n] for n in np.sort(chosen)]
    group = Path(source).name.split(".")[0] if group is None else group
    return [Prompt(row.text, group) for row in rows[:limit]]


def _is_plain(path: Path) -> bool:
    return path.is_file() and not {suffix.lower() for suffix in path.suffixes} & {*FORMATS, *COMPRESSIONS}


def _read_plain(path: Path) -> Iterator[_Row]:
    """Read one prompt per line; blank lines are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{str(path)!r} is not a text file: {error}.", "give a text file with one prompt per line."
        ) from error
    return (_Row(line.rstrip(), None) for line in lines if line.strip())


def _read_rows(source: str | Path) -> Iterator[_Row]:
    first = 1
    for table in read_table(source):
        column = next((name for name in ("prompt", "text") if name in table.columns), None)
        if column is None:
            found = ", ".join(map(str, table.columns)) or "none"
            raise DataError(f"{source} has no prompts, but the fields {found}.", f"give prompts as {WANTED}.")
        scores = table["toxicity"] if "toxicity" in table.columns else [None] * len(table)
        for number, (prompt, score) in enumerate(zip(table[column], scores, strict=True), first):
            yield _read_row(f"{source}, row {number}", prompt, score)
        first += len(table)


def _read_row(place: str, prompt: Any, score: Any) -> _Row:
    if isinstance(prompt, dict):
        text, score, found = prompt.get("text"), prompt.get("toxicity"), f"has the fields {', '.join(map(str, prompt))}"
    else:
        text, found = prompt, f"is {prompt!r}"
    if not isinstance(text, str):
        raise DataError(f"{place}: the prompt {found}.", f"give prompts as {WANTED}.")
    return _Row(text.rstrip(), _number(place, score))


def _number(place: str, score: Any) -> float | None:
    try:
        number = None if score is None or score == "" else float(score)
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: toxicity must be a number or empty, got {score!r}.", "change this row.") from error
    return None if number is None or number != number else number


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
    found: dict[tuple[str, str], GeneratedTexts] = {}
    for file in files:
        if not file.is_file():
            raise DataError(f"there is no file {str(file)!r}.", "give a jsonl file with generations.")
        for number, row in read_numbered_lines(file):
            prompt, continuations = _read_line(f"{file}, line {number}", row)
            part = found.setdefault(
                (str(row.get("cell") or file.stem), str(row.get("group") or "all")), GeneratedTexts()
            )
            part.prompts.append(prompt)
            part.continuations.append(continuations)
    if not found:
        raise DataError(f"there are no generations in {', '.join(map(str, files))}.", "give a jsonl file with some.")
    return found


def _read_line(place: str, row: Any) -> tuple[str, list[str]]:
    """Take the prompt and its continuations from a line."""
    fields = ", ".join(map(str, row)) if isinstance(row, dict) else repr(row)
    if isinstance(row, dict) and "continuations" in row:
        prompt, texts = row.get("text"), row["continuations"]
    elif isinstance(row, dict) and "generations" in row:
        prompt, texts = row.get("prompt"), row["generations"]
    else:
        raise DataError(f"{place} has no generations, but {fields}.", LINE_FORMATS)
    prompt = prompt.get("text") if isinstance(prompt, dict) else prompt
    items = [] if texts is None else texts if isinstance(texts, list) else [None]
    plain: list[Any] = [text.get("text") if isinstance(text, dict) else text for text in items]
    if not isinstance(prompt, str) or not all(isinstance(text, str) for text in plain):
        raise DataError(f"{place} has {fields}, but not as texts.", LINE_FORMATS)
    return prompt, plain
