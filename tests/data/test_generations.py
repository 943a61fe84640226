"""Generations of radq and of other programs are read, and lines without texts are refused by their place."""

import json
from pathlib import Path
from typing import Any

import pytest

from radq.data.prompts import read_generations
from radq.errors import DataError


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_both_formats_are_read_by_cell_and_class(tmp_path: Path) -> None:
    ours = {"cell": "none", "group": "neutral", "text": "a", "continuations": [" b", " c"]}
    theirs = {"prompt": {"text": "a"}, "generations": [{"text": " b"}, " c"]}
    files = [write(tmp_path / "ours.jsonl", ours, ours | {"text": "d"}), write(tmp_path / "theirs.jsonl", theirs)]
    found = read_generations(files)
    assert list(found) == [("none", "neutral"), ("theirs", "all")]
    assert found["none", "neutral"].prompts == ["a", "d"]
    assert found["theirs", "all"].continuations == [[" b", " c"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "why"}, "line 1 has no generations, but question"),
        ([1, 2], "line 1 has no generations"),
        ({"text": "a", "continuations": 3}, "not as texts"),
        ({"text": "a", "continuations": [3]}, "not as texts"),
        ({"text": None, "continuations": ["b"]}, "not as texts"),
    ],
)
def test_other_lines_are_refused(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_generations([write(tmp_path / "rows.jsonl", row)])


def test_files_without_generations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file"):
        read_generations([tmp_path / "missing.jsonl"])
    with pytest.raises(DataError, match="no generations"):
        read_generations([write(tmp_path / "empty.jsonl")])
