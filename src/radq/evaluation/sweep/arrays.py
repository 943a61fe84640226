"""The numbers of each text of a cell, in measures/CELL.npz of a run folder.

They are scores[judge], nll and tokens, and drawn_nll where decoding has noted it; each is an array (p, n).
"""

from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from radq.errors import DataError
from radq.files import whole_file


def array_file(folder: Path, cell: str) -> Path:
    return folder / "measures" / f"{cell}.npz"


def write_arrays(folder: Path, cell: str, arrays: dict[str, np.ndarray]) -> None:
    with whole_file(array_file(folder, cell)) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]


def read_arrays(folder: Path, cell: str) -> dict[str, np.ndarray]:
    """Read the numbers of a cell. Files come from strangers too: no pickles, and nothing outside of the run folder."""
    file = array_file(folder, cell)
    try:
        if file.resolve().parent != (folder / "measures").resolve():
            raise ValueError("it is not in the run folder")
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise DataError(
            f"{str(file)!r} cannot be read: {error}.", "delete it, and run the same radq eval again."
        ) from error
