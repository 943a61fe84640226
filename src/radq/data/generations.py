"""Generations that somebody else has made: prompts and their continuations from jsonl files."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radq.errors import DataError
from radq.files import read_lines

WANTED = '"text" and "continuations" as radq eval writes them, or "prompt" and "generations" as DExperts and RAD do'


@dataclass
class Texts:
    """Prompts of one cell and class, each with its continuations."""

    prompts: list[str] = field(default_factory=list)
    continuations: list[list[str]] = field(default_factory=list)


def read_texts(files: Sequence[Path]) -> dict[tuple[str, str], Texts]:
    """By cell and class of prompts, in the order of the files; what says neither is of the file's name, and "all"."""
    found: dict[tuple[str, str], Texts] = {}
    for file in files:
        if not file.is_file():
            raise DataError(f"there is no file {str(file)!r}.", "give a jsonl file with generations.")
        for number, row in enumerate(read_lines(file), 1):
            prompt, continuations = _read(f"{str(file)!r}, line {number}", row)
            part = found.setdefault((row.get("cell") or file.stem, row.get("group") or "all"), Texts())
            part.prompts.append(prompt)
            part.continuations.append(continuations)
    if not found:
        raise DataError(f"{', '.join(map(str, files))}: there are no generations.", "is it the right file?")
    return found


def _read(place: str, row: Any) -> tuple[str, list[str]]:
    fields = ", ".join(map(str, row)) if isinstance(row, dict) else repr(row)
    if isinstance(row, dict) and "continuations" in row:
        prompt, texts = row.get("text"), row["continuations"]
    elif isinstance(row, dict) and "generations" in row:
        prompt, texts = row.get("prompt"), row["generations"]
    else:
        raise DataError(f"{place} has {fields}.", f"wanted are {WANTED}.")
    prompt = prompt.get("text") if isinstance(prompt, dict) else prompt
    texts = [] if texts is None else texts
    plain: list[Any] = [
        text.get("text") if isinstance(text, dict) else text for text in texts if isinstance(texts, list)
    ]
    if not isinstance(prompt, str) or not isinstance(texts, list) or not all(isinstance(text, str) for text in plain):
        raise DataError(f"{place} has {fields}, but not as texts.", f"wanted are {WANTED}.")
    return prompt, plain
