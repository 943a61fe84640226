"""Results that are computed once and kept on disk, in pieces of one file each, of which an interrupted computation
makes only the missing ones.

    pieces = [StoredPiece(folder / f"{key}-{n}.npz", rows, 4 * len(rows)) for n, rows in enumerate(chunks)]
    check_room(folder, pieces, "the numbers", "make room on the disk.")
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
from radq.files import atomic_file, explained_writing, require_room

Contents = TypeVar("Contents")


@dataclass(frozen=True)
class StoredPiece(Generic[Contents]):
    """A file, and what is computed for it."""

    file: Path
    contents: Contents  # such as the numbers of its texts
    size: int  # bytes of the complete file
    is_exact: bool = True  # otherwise the size is an estimate, and a file that is there counts as complete

    @property
    def is_made(self) -> bool:
        return self.file.exists() and (not self.is_exact or self.file.stat().st_size == self.size)

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """Make a temporary file that becomes the piece when the block succeeds and is deleted when it fails."""
        with explained_writing(self.file), atomic_file(self.file) as temporary:
            yield temporary


def missing(pieces: Iterable[StoredPiece[Contents]]) -> list[StoredPiece[Contents]]:
    """The pieces that are still to be computed."""
    return [piece for piece in pieces if not piece.is_made]


def check_room(folder: Path, pieces: Iterable[StoredPiece[Any]], what: str, hint: str) -> None:
    """Refuse to begin if the disk of a folder has no room for the pieces that are still to be computed."""
    require_room(folder, sum(piece.size for piece in missing(pieces)), what, hint)


def save_arrays(piece: StoredPiece[Any], **arrays: np.ndarray) -> None:
    """Write arrays, by their names, as a piece."""
    with piece.writing() as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]


def load_arrays(file: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read the arrays of these names that `save_arrays` has written."""
    try:
        with file.open("rb") as stream, np.load(stream) as stored:
            return {name: stored[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"{str(file)!r} is damaged: {error}.", "delete this file; radq makes it again.") from error
