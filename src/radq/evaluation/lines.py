"""Files with a JSON object on every line, which a kill at any moment leaves readable."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from radq.errors import DataError


def append_lines(stream: BinaryIO, rows: list[dict[str, Any]]) -> None:
    """In one piece, and to the disk."""
    stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    stream.flush()
    os.fsync(stream.fileno())


def mend(file: Path) -> None:
    """Cut off a torn last line, so that more can be appended."""
    if file.exists():
        data = file.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(file, data.rfind(b"\n") + 1)


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a jsonl file; a torn last line, of a process that was killed, is none."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise DataError(
                    f"{str(file)!r}, line {number} is damaged.", "remove the line, or make it anew."
                ) from error
