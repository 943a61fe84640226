"""Prompts and their continuations in jsonl files, written by radq or by other programs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radq.errors import DataError
from radq.files import read_numbered_lines

FORMATS = (
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
            prompt, continuations = _read_row(f"{file}, line {number}", row)
            part = found.setdefault(
                (str(row.get("cell") or file.stem), str(row.get("group") or "all")), GeneratedTexts()
            )
            part.prompts.append(prompt)
            part.continuations.append(continuations)
    if not found:
        raise DataError(f"there are no generations in {', '.join(map(str, files))}.", "give a jsonl file with some.")
    return found


def _read_row(place: str, row: Any) -> tuple[str, list[str]]:
    """Take the prompt and its continuations from a line."""
    fields = ", ".join(map(str, row)) if isinstance(row, dict) else repr(row)
    if isinstance(row, dict) and "continuations" in row:
        prompt, texts = row.get("text"), row["continuations"]
    elif isinstance(row, dict) and "generations" in row:
        prompt, texts = row.get("prompt"), row["generations"]
    else:
        raise DataError(f"{place} has no generations, but {fields}.", FORMATS)
    prompt = prompt.get("text") if isinstance(prompt, dict) else prompt
    items = [] if texts is None else texts if isinstance(texts, list) else [None]
    plain: list[Any] = [text.get("text") if isinstance(text, dict) else text for text in items]
    if not isinstance(prompt, str) or not all(isinstance(text, str) for text in plain):
        raise DataError(f"{place} has {fields}, but not as texts.", FORMATS)
    return prompt, plain
