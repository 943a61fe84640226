"""Rows that a Python program holds or reads one by one, kept in a file from which training reads them as any table.

    file = store_rows(dataset, ["text", "praise"])

The rows are a data set of the package `datasets`, streamed or not, a pandas.DataFrame, a dictionary of columns, or any
iterable of dictionaries. They are read once, and a few at a time, so that they may be more than fit into memory.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from radq.errors import DataError, OptionError
from radq.files import FINGERPRINT_LENGTH, default_cache_folder, explained_writing, name_temporary

Rows = Any  # a pandas.DataFrame, a mapping of columns, or an iterable of mappings


def store_rows(
    rows: Rows,
    columns: list[str],
    cache_folder: str | Path | None = None,
    progress: bool = False,
    optional: Sequence[str] = (),
) -> Path:
    """Write these columns of all rows into a jsonl file of the cache, whose name is a fingerprint of its contents.

    A missing value is null. Rows may lack the columns that are optional.
    """
    import pyarrow
    from tqdm import tqdm

    required = [name for name in columns if name not in optional]
    folder, digest, number = Path(cache_folder or default_cache_folder()) / "rows", hashlib.sha256(), 0
    temporary = name_temporary(folder / "rows.jsonl.zst")
    found = tqdm(_iterate(rows, columns, required), unit="row", desc="reading rows", disable=not progress)
    try:
        with explained_writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with pyarrow.output_stream(str(temporary), compression="zstd") as stream:
                for number, row in enumerate(found, 1):
                    line = _write_line(number, row, columns, required)
                    digest.update(line)
                    stream.write(line)
            if not number:
                raise DataError("the data has no rows.", "give one row or more.")
            file = folder / f"{digest.hexdigest()[:FINGERPRINT_LENGTH]}.jsonl.zst"
            if not file.exists():  # else it has the same contents
                temporary.replace(file)
            return file
    finally:
        temporary.unlink(missing_ok=True)


def _iterate(rows: Rows, columns: list[str], required: list[str]) -> Iterator[Any]:
    import pandas

    if isinstance(rows, Mapping):
        _require_columns(rows, required)
        rows = pandas.DataFrame({name: list(rows[name]) for name in columns if name in rows})
    if isinstance(rows, pandas.DataFrame):
        _require_columns(rows.columns, required)
        columns = [name for name in columns if name in rows.columns]
        places = [list(rows.columns).index(name) for name in columns]
        for values in rows.itertuples(index=False, name=None):
            yield {name: values[place] for name, place in zip(columns, places, strict=True)}
        return
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise OptionError(
            f"data must be rows, got {type(rows).__name__}.", "give a Dataset, a DataFrame, or a list of dictionaries."
        )
    yield from rows


def _require_columns(found: Iterable[Any], columns: list[str]) -> None:
    names = list(found)
    for name in columns:
        if name not in names:
            hint = f"it has {', '.join(map(str, names)) or 'none'}."
            raise DataError(f"the data has no column {name!r}.", hint)


def _write_line(number: int, row: Any, columns: list[str], required: list[str]) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(f"row {number} of the data is a {type(row).__name__}.", "give each row as a dictionary.")
    if number == 1:
        _require_columns(row, required)
    try:
        return json.dumps({name: _plain(row.get(name)) for name in columns}).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"row {number} of the data: {error}.", "give texts, numbers, and lists of these.") from error


def _plain(value: Any) -> Any:
    """A value that JSON can hold; a missing number is null."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(item) for item in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and value != value else value
