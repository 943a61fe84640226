"""A copy of a table file with more columns of numbers; all else stays as it is.

    copy_with_columns("reviews.csv", "reviews.scored.csv", {"reward_praise": [0.7, None]})

Rows of csv, tsv and jsonl files are copied character by character, and of parquet files value by value with their
types. A number that is None becomes an empty cell, or null.
"""

import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from radq.data.tables import find_format, open_table, read_table, seekable
from radq.errors import DataError, OptionError
from radq.files import atomic_file, explained_writing

ROWS_PER_GROUP = 2**16  # of parquet
Columns = Mapping[str, Sequence[float | None]]  # one number for each row of the table, by name
END_OF_LINE = re.compile(r"\r?\n?\Z")


def name_copy(source: Path) -> Path:
    """The name of a copy beside the source: reviews.csv.gz becomes reviews.scored.csv.gz."""
    start = source.name.lower().rindex(find_format(source))
    return source.with_name(f"{source.name[:start]}.scored{source.name[start:]}")


def check_copy(source: Path, target: Path, names: Sequence[str], overwrite: bool) -> None:
    """Refuse, before any work, a copy that could not be written."""
    if not source.is_file():
        raise DataError(f"there is no file {str(source)!r}.", "give a csv, tsv, jsonl or parquet file.")
    if find_format(target) != find_format(source):
        raise OptionError(
            f"the copy {str(target)!r} must be of the format of {source.name!r}.", f"end it in {find_format(source)}."
        )
    if target.is_dir() or (target.exists() and target.samefile(source)):
        kind = "a folder" if target.is_dir() else "the file that is read"
        raise OptionError(f"{str(target)!r} is {kind}.", "give the name of another file.")
    if target.exists() and not overwrite:
        raise OptionError(f"{str(target)!r} exists.", "name another file, or replace it with --overwrite.")
    for table in read_table(source):
        _refuse_columns(source, table.columns, names)
        return


def copy_with_columns(source: Path, target: Path, columns: Columns) -> None:
    """Write the copy, whole or not at all."""
    with (
        explained_writing(target),
        atomic_file(target) as temporary,
        open_table(source) as reading,
        _create(temporary, target.suffix.lower()) as writing,
    ):
        COPIERS[find_format(source)](source, reading, writing, columns)


def _create(file: Path, compression: str) -> Any:
    if compression == ".gz":
        return gzip.open(file, "wb")
    if compression == ".xz":
        return lzma.open(file, "wb")
    if compression == ".zst":
        import pyarrow

        return pyarrow.output_stream(str(file), compression="zstd")
    return file.open("wb")


def _refuse_columns(source: Path, found: Any, names: Sequence[str]) -> None:
    for name in names:
        if name in found:
            raise DataError(f"{source} has a column {name!r} already.", "rename or remove that column.")


def _rows(source: Path, columns: Columns) -> Iterator[tuple[float | None, ...]]:
    """The numbers of each row; an error if more rows are asked for."""
    yield from zip(*columns.values(), strict=True)
    raise _changed(source)


def _changed(source: Path) -> DataError:
    return DataError(f"{source} has changed while it was read.", "run the command again.")


def _show(number: float | None) -> str:
    return "" if number is None else f"{number:.6g}"


# --- formats ---


def _copy_csv(source: Path, reading: Any, writing: Any, columns: Columns) -> None:
    header = io.StringIO()
    csv.writer(header, lineterminator="").writerow(columns)
    _copy_separated(source, reading, writing, columns, header.getvalue(), delimiter=",", strict=True)


def _copy_tsv(source: Path, reading: Any, writing: Any, columns: Columns) -> None:
    for name in columns:
        if re.search(r"[\t\r\n]", name):
            raise DataError(f"a tsv file cannot hold a column {name!r}.", "use a csv file.")
    _copy_separated(source, reading, writing, columns, "\t".join(columns), delimiter="\t", quoting=csv.QUOTE_NONE)


def _copy_separated(
    source: Path, reading: Any, writing: Any, columns: Columns, header: str, delimiter: str, **dialect: Any
) -> None:
    """Append cells to the lines of each row. A row may have several lines, and blank lines are no rows."""
    cells = chain([header], (delimiter.join(map(_show, row)) for row in _rows(source, columns)))
    lines: list[str] = []  # of the current row

    def taken(stream: Any) -> Iterator[str]:
        for line in stream:
            lines.append(line)
            yield line.removeprefix("\ufeff")  # as Excel begins files

    with _as_text(reading) as before, _as_text(writing) as after:
        for row in csv.reader(taken(before), delimiter=delimiter, **dialect):
            whole = "".join(lines)
            lines.clear()
            end = END_OF_LINE.search(whole).start()  # pyright: ignore[reportOptionalMemberAccess]
            after.write(f"{whole[:end]}{delimiter}{next(cells)}{whole[end:]}" if row else whole)


def _copy_jsonl(source: Path, reading: Any, writing: Any, columns: Columns) -> None:
    """Append values inside the last brace of each line."""
    rows = _rows(source, columns)
    with _as_text(reading) as before, _as_text(writing) as after:
        for line in before:
            body = line.rstrip()
            after.write(_extend(source, body, columns, next(rows)) if body else "")
            after.write(line[len(body) :])


def _extend(source: Path, line: str, names: Iterable[str], numbers: Sequence[float | None]) -> str:
    stored = json.loads(line)
    if not isinstance(stored, dict):
        raise _changed(source)
    _refuse_columns(source, stored, list(names))
    shown = (None if number is None else float(_show(number)) for number in numbers)
    added = json.dumps(dict(zip(names, shown, strict=True)), ensure_ascii=False)
    return f"{line[:-1]}{', ' * bool(stored)}{added[1:]}"


def _as_text(stream: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, encoding="utf-8", newline="")


def _copy_parquet(source: Path, reading: Any, writing: Any, columns: Columns) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetFile, ParquetWriter

    with seekable(reading) as stream:
        file = ParquetFile(stream)
        schema = file.schema_arrow
        _refuse_columns(source, schema.names, list(columns))
        for name in columns:
            schema = schema.append(pyarrow.field(name, pyarrow.float64()))
        if any(len(numbers) != file.metadata.num_rows for numbers in columns.values()):
            raise _changed(source)
        first = 0
        with ParquetWriter(writing, schema) as writer:
            for batch in file.iter_batches(ROWS_PER_GROUP):
                numbers = [list(column[first : first + len(batch)]) for column in columns.values()]
                added = [pyarrow.array(part, pyarrow.float64()) for part in numbers]
                writer.write_batch(pyarrow.record_batch([*batch.columns, *added], schema=schema))
                first += len(batch)


COPIERS: dict[str, Any] = {".csv": _copy_csv, ".tsv": _copy_tsv, ".jsonl": _copy_jsonl, ".parquet": _copy_parquet}
