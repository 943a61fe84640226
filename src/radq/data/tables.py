"""Tables from files or from the hub, read in pieces, and their columns as texts and numbers.

    for table in read_table("reviews.csv.gz"):  # a pandas.DataFrame of some thousand rows
        column_texts("reviews.csv.gz", table, "text")

An error in a file names the file, the row or line, and the value.
"""

import csv
import gzip
import io
import lzma
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np

from radq.errors import DataError, first_line, install_hint

Table = Any  # a pandas.DataFrame, which is imported only where a table is read
ROWS_PER_PIECE = 5_000
FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".xz", ".zst")


def read_table(source: str | Path) -> Iterator[Table]:
    """Read a table in pieces: csv, tsv, jsonl or parquet, also compressed, or a hub data set."""
    path = Path(source)
    if not path.is_file():
        yield from _read_hub(str(source))
        return
    kind = find_format(path)
    try:
        with open_table(path) as stream:
            yield from READERS[kind](stream)
    except _RaggedRowError as error:
        raise DataError(f"{path}, {error}", "put quotes around texts that contain the separator.") from error
    except (EOFError, lzma.LZMAError, csv.Error, TypeError, ValueError, ArithmeticError, OSError) as error:
        if isinstance(error, DataError):
            raise
        reason = first_line(error)
        raise DataError(
            f"{str(path)!r} cannot be read as {kind[1:]}: {reason}.",
            "check that the file is complete and of this format.",
        ) from error


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
                check_columns(source, table, columns, optional)
        else:
            _require_hub(str(source))


def read_text_column(source: str | Path, column: str) -> list[str]:
    """Read all texts of a column, including empty ones."""
    texts, first_row = [], 1
    for table in read_table(source):
        check_columns(source, table, [column])
        table.index = np.arange(first_row, first_row + len(table))
        first_row += len(table)
        texts += column_texts(source, table, column)
    return texts


# --- columns ---


def check_columns(source: str | Path, table: Table, names: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Refuse a table without one of these columns that is not optional, or with two of the same name."""
    columns = list(table.columns)
    for name in names:
        if name not in columns and name not in optional:
            raise DataError(f"{source} has no column {name!r}.", f"it has {', '.join(map(str, columns)) or 'none'}.")
        if columns.count(name) > 1:
            raise DataError(f"{source} has {columns.count(name)} columns {name!r}.", "rename all of them but one.")


def column_texts(source: str | Path, table: Table, column: str) -> list[str]:
    """Texts of a column, without trailing whitespace; a missing text is empty. The table's index numbers the rows."""
    texts = []
    for row, value in zip(table.index, table[column], strict=True):
        try:
            texts.append(cell_text(value, column))
        except DataError as error:
            raise DataError(f"{source}, row {row}: {error.message}", error.hint) from error
    return texts


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


def column_numbers(source: str | Path, table: Table, column: str) -> np.ndarray:
    """Numbers of a column in double precision; all must be finite. The table's index numbers the rows."""
    import pandas

    try:
        numbers = np.asarray(pandas.to_numeric(table[column], errors="coerce"), dtype=np.float64)
    except (OverflowError, TypeError, ValueError):  # pandas cannot hold an integer of hundreds of digits
        numbers = np.array([_number(value) for value in table[column]])
    refuse_rows(source, table, column, ~np.isfinite(numbers), "a finite number")
    return numbers


def _number(value: Any) -> float:
    try:
        return float(value)
    except (OverflowError, TypeError, ValueError):
        return np.nan


def refuse_rows(
    source: str | Path,
    table: Table,
    column: str,
    wrong: np.ndarray,
    allowed: str,
    hint: str = "change or remove this row.",
) -> None:
    """Raise an error for the first row that is marked as wrong; it names the row, its value, and allowed values."""
    if wrong.any():
        first = int(np.argmax(wrong))
        value = table[column].iloc[first]
        value = value.item() if isinstance(value, np.generic) else value
        raise DataError(f"{source}, row {table.index[first]}: {column!r} must be {allowed}, got {value!r}.", hint)


# --- formats ---


class _RaggedRowError(Exception):
    """A row with more or fewer fields than there are columns."""


def _read_csv(stream: Any) -> Iterator[Table]:
    return _read_separated(stream, delimiter=",", strict=True)


def _read_tsv(stream: Any) -> Iterator[Table]:
    return _read_separated(stream, delimiter="\t", quoting=csv.QUOTE_NONE)  # tsv files have no quotes


def _read_separated(stream: Any, **dialect: Any) -> Iterator[Table]:
    """Read cells as texts, so that "NA" and "null" stay words. Every row must have a field for each column."""
    import pandas

    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, **dialect)
        header = next((row for row in reader if row), None)
        if header is None:
            raise ValueError("it is empty")
        rows = _rows(reader, len(header))
        while True:
            piece = list(islice(rows, ROWS_PER_PIECE))
            yield pandas.DataFrame(piece, columns=pandas.Index(header, dtype=object), dtype=object)
            if len(piece) < ROWS_PER_PIECE:
                return


def _rows(reader: Any, num_columns: int) -> Iterator[list[str]]:
    """Rows that are not blank. The reader counts lines, since a text may contain line breaks."""
    line = reader.line_num + 1
    for row in reader:
        if len(row) == num_columns:
            yield row
        elif row:
            fields = f"{len(row)} field{'s' * (len(row) > 1)}"
            raise _RaggedRowError(f"line {line}: {fields} in a table of {num_columns} columns.")
        line = reader.line_num + 1


def _read_jsonl(stream: Any) -> Iterator[Table]:
    import pandas

    options: Any = {"dtype": False}  # values stay as they are: pandas must not guess dates and types
    yield from pandas.read_json(stream, lines=True, chunksize=ROWS_PER_PIECE, **options)


def _read_parquet(stream: Any) -> Iterator[Table]:
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


def open_table(path: Path) -> Any:
    """Open a file for reading bytes, decompressed."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".zst":
        import pyarrow

        return pyarrow.input_stream(str(path), compression="zstd")
    return path.open("rb")


def split_hub_name(source: str) -> tuple[str, str]:
    """Split the name of a hub data set, `name` or `name:split`, into name and split; the default split is train."""
    name, _, split = source.partition(":")
    return name, split or "train"


def find_revision(name: str) -> str:
    """The revision of a hub data set that would be read now; without a network, that of the copy in the cache."""
    _require_hub(name)
    import datasets  # pyright: ignore[reportMissingImports]

    with _explained_hub(name):
        return str(datasets.load_dataset_builder(name).hash)


@contextmanager
def _explained_hub(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises errors of many types
        raise DataError(f"there is neither a file nor a data set {name!r}: {error}.", "check the name.") from error


def _require_hub(source: str) -> None:
    """Refuse a file that is not there: a source that cannot be a data set, or where `datasets` is not installed."""
    if Path(source).suffix.lower() in (*FORMATS, *COMPRESSIONS) or find_spec("datasets") is None:
        raise DataError(f"there is no file {source!r}.", f"check the path; for a hub data set, {install_hint('data')}")


def _read_hub(source: str) -> Iterator[Table]:
    """Read a data set from the hub, or from a folder that the package `datasets` can read."""
    _require_hub(source)
    import datasets  # pyright: ignore[reportMissingImports]

    name, split = split_hub_name(source)
    with _explained_hub(name):
        table = datasets.load_dataset(name, split=split)
    for first in range(0, len(table), ROWS_PER_PIECE):
        yield table.select(range(first, min(first + ROWS_PER_PIECE, len(table)))).to_pandas()


READERS: dict[str, Any] = {".csv": _read_csv, ".tsv": _read_tsv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
