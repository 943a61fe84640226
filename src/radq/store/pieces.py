"""Pieces of a long computation, each of which is a file: after an interruption, the missing ones alone are computed.

    pieces = [Piece(folder / f"{key}-{n}.npz", rows) for n, rows in enumerate(chunks)]
    for piece in missing(pieces):
        save_arrays(piece, **compute(piece.contents))

The name of a file, or of its folder, is made of fingerprints of all that its contents depend on, so that a file never
serves others. A file is written completely or not at all, and processes that compute the same write the same.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from zipfile import BadZipFile

import numpy as np

from radq.errors import DataError
from radq.files import explained_writing, whole_file

Contents = TypeVar("Contents")


@dataclass(frozen=True)
class Piece(Generic[Contents]):
    """A file, and what is computed for it."""

    file: Path
    contents: Contents  # such as the numbers of its texts
    size: int | None = None  # bytes of the complete file; None if a file that is there counts as complete

    @property
    def is_made(self) -> bool:
        """Whether the file is there, and complete."""
        return self.file.exists() and self.size in (None, self.file.stat().st_size)

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Make a temporary file that becomes the piece when the block succeeds and is deleted when it fails."""
        with explained_writing(self.file), whole_file(self.file) as temporary:
            yield temporary


def missing(pieces: Iterable[Piece[Contents]]) -> list[Piece[Contents]]:
    """The pieces that are still to be computed."""
    return [piece for piece in pieces if not piece.is_made]


def save_arrays(piece: Piece[Any], **arrays: np.ndarray) -> None:
    """Write arrays, by their names, as a piece."""
    with piece.writing() as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]


def load_arrays(file: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read the arrays of these names that `save_arrays` has written."""
    try:
        with np.load(file) as stored:
            return {name: stored[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{str(file)!r} is damaged: {error}.", "delete this file; radq makes it again.") from error
