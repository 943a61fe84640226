"""Tables from files, from the hub or from rows of a program, read in pieces, and their cells.

    for table in read_table("reviews.csv.gz"):  # a pandas.DataFrame of some thousand rows, whose index numbers them
        check_columns("reviews.csv.gz", table.columns, ["text", "praise"])

An error in a file names the file, the row or line, and the value.
"""

import csv
import gzip
import hashlib
import io
import json
import lzma
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np

from radq.errors import DataError, OptionError, first_line, install_hint
from radq.files import FINGERPRINT_LENGTH, default_cache_folder, explained_writing, name_temporary

Table = Any  # a pandas.DataFrame, which is imported only where a table is read
Rows = Any  # a pandas.DataFrame, a mapping of columns, or an iterable of mappings
ROWS_PER_PIECE = 5_000
FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".xz", ".zst")
DIALECTS: dict[str, dict[str, Any]] = {
    ".csv": {"delimiter": ",", "strict": True},
    ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE},  # tsv files have no quotes
}


def read_table(source: str | Path) -> Iterator[Table]:
    """Read a table in pieces: csv, tsv, jsonl or parquet, also compressed, or a hub data set.

    The index of all pieces numbers the rows from 1.
    """
    first_row = 1
    for table in _read_file(Path(source)) if Path(source).is_file() else _read_hub(str(source)):
        table.index = np.arange(first_row, first_row + len(table))
        first_row += len(table)
        yield table


def _read_file(path: Path) -> Iterator[Table]:
    kind = find_format(path)
    try:
        with open_table(path) as stream:
            yield from READERS[kind](path, stream)
    except DataError:
        raise
    except (EOFError, lzma.LZMAError, csv.Error, TypeError, ValueError, ArithmeticError, OSError) as error:
        hint = "check that the file is complete and of this format."
        if isinstance(error, UnicodeError):  # such as Latin-1 or UTF-16
            hint = "save it as UTF-8, which spreadsheets call CSV UTF-8."
        raise DataError(f"{str(path)!r} cannot be read as {kind[1:]}: {first_line(error)}.", hint) from error


def find_format(path: Path) -> str:
    """The format of a file by its name, such as ".csv", whatever compression follows."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = next((suffix for suffix in reversed(suffixes) if suffix in FORMATS), None)
    if kind is None:
        raise DataError(
            f"{str(path)!r} has no ending that radq knows.",
            f"use {', '.join(FORMATS)}, or one of these followed by {', '.join(COMPRESSIONS)}.",
        )
    return kind


def check_sources(sources: Iterable[str | Path], columns: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Refuse files that do not exist, or whose first rows lack one of these columns that is not optional.

    Hub data sets are not fetched.
    """
    for source in sources:
        if Path(source).is_file():
            for table in islice(read_table(source), 1):
                check_columns(source, table.columns, columns, optional)
        else:
            _require_hub(str(source))


def read_text_column(source: str | Path, column: str) -> list[str]:
    """Read all texts of a column, including empty ones."""
    texts = []
    for table in read_table(source):
        check_columns(source, table.columns, [column])
        for row, value in table[column].items():
            with in_row(source, row):
                texts.append(cell_text(value, column))
    return texts


# --- columns ---


def check_columns(
    source: str | Path, columns: Iterable[Any], names: Sequence[str], optional: Sequence[str] = ()
) -> None:
    """Refuse a table without one of these columns that is not optional, or with two of the same name."""
    columns = list(columns)
    for name in names:
        if name not in columns and name not in optional:
            raise DataError(f"{source} has no column {name!r}.", _suggest_column(name, [str(one) for one in columns]))
        if columns.count(name) > 1:
            raise DataError(f"{source} has {columns.count(name)} columns {name!r}.", "rename all of them but one.")


def _suggest_column(name: str, columns: list[str]) -> str:
    """Say how to name a column that the table does not have: by a similar name, or after saving it with commas."""
    separator = next((mark for mark in ";\t|" if mark in columns[0]), "") if len(columns) == 1 else ""
    if separator:
        return f"its columns are separated by {separator!r}: save the table with commas, or with tabs as .tsv."
    plain = {column.strip().casefold(): column for column in columns}
    meant = [plain[match] for match in get_close_matches(name.strip().casefold(), plain, 1)]
    return f"{f'did you mean {meant[0]!r}? ' if meant else ''}it has {', '.join(columns) or 'none'}."


@contextmanager
def in_row(source: str | Path, row: Any) -> Iterator[None]:
    """Put the source and the row before the message of an error about cells."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{source}, row {row}: {error.message}", error.hint) from error


def cell_text(value: Any, column: str) -> str:
    """The text of one cell, without trailing whitespace; a missing text is empty."""
    if isinstance(value, str):
        return value.rstrip()
    if value is None or (isinstance(value, Number) and value != value):
        return ""
    if isinstance(value, Number | np.generic):
        return str(value)
    kind = "list" if isinstance(value, list | tuple | np.ndarray) else type(value).__name__
    raise DataError(
        f"{column!r} is a {kind}, not a text.",
        "write each cell as one text; format chat messages with the chat template of the model first.",
    )


def refuse_rows(
    source: str | Path,
    table: Table,
    column: str,
    wrong: np.ndarray,
    problem: str,
    hint: str = "change or remove this row.",
) -> None:
    """Raise an error for the first row that is marked as wrong; it names the row, the problem and the value."""
    if wrong.any():
        first = int(np.argmax(wrong))
        value = table[column].iloc[first]
        value = value.item() if isinstance(value, np.generic) else value
        raise DataError(f"{source}, row {table.index[first]}: {column!r} {problem}, got {value!r}.", hint)


# --- formats ---


def _read_separated(path: Path, stream: Any) -> Iterator[Table]:
    """Read cells as texts, so that "NA" and "null" stay words. Every row must have a field for each column."""
    import pandas

    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, **DIALECTS[find_format(path)])
        header = next((row for row in reader if row), None)
        if header is None:
            raise ValueError("it is empty")
        rows = _rows(path, reader, len(header))
        while True:
            piece = list(islice(rows, ROWS_PER_PIECE))
            yield pandas.DataFrame(piece, columns=pandas.Index(header, dtype=object), dtype=object)
            if len(piece) < ROWS_PER_PIECE:
                return


def _rows(path: Path, reader: Any, num_columns: int) -> Iterator[list[str]]:
    """Rows that are not blank. The reader counts lines, since a text may contain line breaks."""
    line = reader.line_num + 1
    for row in reader:
        if len(row) == num_columns:
            yield row
        elif row:
            raise DataError(
                f"{path}, line {line}: {len(row)} field{'s' * (len(row) > 1)} in a table of {num_columns} columns.",
                "put quotes around texts that contain the separator.",
            )
        line = reader.line_num + 1


def _read_jsonl(path: Path, stream: Any) -> Iterator[Table]:
    import pandas

    options: Any = {"dtype": False}  # values stay as they are: pandas must not guess dates and types
    yield from pandas.read_json(stream, lines=True, chunksize=ROWS_PER_PIECE, **options)


def _read_parquet(path: Path, stream: Any) -> Iterator[Table]:
    from pyarrow.parquet import ParquetFile

    with seekable(stream) as copy:
        for piece in ParquetFile(copy).iter_batches(ROWS_PER_PIECE):
            yield piece.to_pandas()


@contextmanager
def seekable(stream: Any) -> Iterator[Any]:
    """A stream for readers of parquet, which begin at the end of a file: a temporary copy of a compressed one."""
    if isinstance(stream, io.BufferedReader):  # a file itself
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        yield copy


def open_table(path: Path, mode: str = "rb", compression: str | None = None) -> Any:
    """Open a file for reading or writing bytes, compressed as the ending of its name says unless `compression` does."""
    compression = (path.suffix if compression is None else compression).lower()
    if compression == ".zst":
        import pyarrow

        open_stream = pyarrow.input_stream if mode == "rb" else pyarrow.output_stream
        return open_stream(str(path), compression="zstd")
    return {".gz": gzip.open, ".xz": lzma.open}.get(compression, Path.open)(path, mode)


READERS: dict[str, Any] = {
    ".csv": _read_separated,
    ".tsv": _read_separated,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


# --- the hub ---


def split_hub_name(source: str) -> tuple[str, str]:
    """Split the name of a hub data set, `name` or `name:split`, into name and split; the default split is train."""
    name, _, split = source.partition(":")
    return name, split or "train"


def find_revision(name: str) -> str:
    """The revision of a hub data set that would be read now; without a network, that of the copy in the cache."""
    return _ask_hub(name, lambda datasets: str(datasets.load_dataset_builder(name).hash))


def _read_hub(source: str) -> Iterator[Table]:
    """Read a data set from the hub, or from a folder that the package `datasets` can read."""
    name, split = split_hub_name(source)
    table = _ask_hub(name, lambda datasets: datasets.load_dataset(name, split=split))
    for first in range(0, len(table), ROWS_PER_PIECE):
        yield table.select(range(first, min(first + ROWS_PER_PIECE, len(table)))).to_pandas()


def _ask_hub(name: str, ask: Callable[[Any], Any]) -> Any:
    """Ask the package `datasets` for a data set."""
    _require_hub(name)
    try:
        return ask(import_module("datasets"))
    except Exception as error:  # the library raises errors of many types
        raise DataError(f"there is neither a file nor a data set {name!r}: {error}.", "check the name.") from error


def _require_hub(source: str) -> None:
    """Refuse a file that is not there: a source that cannot be a data set, or where `datasets` is not installed."""
    if Path(source).suffix.lower() in (*FORMATS, *COMPRESSIONS) or find_spec("datasets") is None:
        raise DataError(f"there is no file {source!r}.", f"check the path; for a hub data set, {install_hint('data')}")


# --- rows of a program ---


def store_rows(
    rows: Rows,
    columns: list[str],
    cache_folder: str | Path | None = None,
    progress: bool = False,
    optional: Sequence[str] = (),
) -> Path:
    """Write these columns of all rows into a jsonl file of the cache, whose name is a fingerprint of its contents.

    The rows are read once, and a few at a time, so that they may be more than fit into memory. A missing value is null,
    and rows may lack the columns that are optional.
    """
    from tqdm import tqdm

    folder, digest, number = Path(cache_folder or default_cache_folder()) / "rows", hashlib.sha256(), 0
    temporary = name_temporary(folder / "rows.jsonl.zst")
    read = tqdm(_iterate(rows, columns, optional), unit="row", desc="reading rows", disable=not progress)
    try:
        with explained_writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with open_table(temporary, "wb", ".zst") as stream:
                for number, row in enumerate(read, 1):
                    line = _write_line(number, row, columns, optional)
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


def _iterate(rows: Rows, columns: list[str], optional: Sequence[str]) -> Iterator[Any]:
    import pandas

    if isinstance(rows, pandas.DataFrame | Mapping):
        check_columns("the data", rows, columns, optional)  # iterating over either gives the names of its columns
        present = [name for name in columns if name in rows]
        for cells in zip(*(rows[name] for name in present), strict=True):
            yield dict(zip(present, cells, strict=True))
        return
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise OptionError(
            f"data must be rows, got {type(rows).__name__}.", "give a Dataset, a DataFrame, or a list of dictionaries."
        )
    yield from rows


def _write_line(number: int, row: Any, columns: list[str], optional: Sequence[str]) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(f"row {number} of the data is a {type(row).__name__}.", "give each row as a dictionary.")
    if number == 1:
        check_columns("the data", row, columns, optional)
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
