"""A copy of a table file with more columns of numbers; all else stays as it is.

    copy_with_columns("reviews.csv", "reviews.scored.csv", {"reward_praise": [0.7, None]})

Rows of csv, tsv and jsonl files are copied character by character, and of parquet files value by value with their
types. A number that is None becomes an empty cell, or null.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from radq.data.tables import DIALECTS, find_format, open_table, read_table, seekable
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
        open_table(temporary, "wb", target.suffix) as writing,
    ):
        COPIERS[find_format(source)](source, reading, writing, columns)


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


def _copy_separated(source: Path, reading: Any, writing: Any, columns: Columns) -> None:
    """Append cells to the lines of each row. A row may have several lines, and blank lines are no rows."""
    dialect = DIALECTS[find_format(source)]
    delimiter = dialect["delimiter"]
    header = delimiter.join(_write_name(name, delimiter) for name in columns)
    cells = chain([header], (delimiter.join(map(_show, row)) for row in _rows(source, columns)))
    lines: list[str] = []  # of the current row

    def taken(stream: Any) -> Iterator[str]:
        for line in stream:
            lines.append(line)
            yield line.removeprefix("\ufeff")  # as Excel begins files

    with _as_text(reading) as before, _as_text(writing) as after:
        for row in csv.reader(taken(before), **dialect):
            whole = "".join(lines)
            lines.clear()
            end = END_OF_LINE.search(whole).start()  # pyright: ignore[reportOptionalMemberAccess]
            after.write(f"{whole[:end]}{delimiter}{next(cells)}{whole[end:]}" if row else whole)


def _write_name(name: str, delimiter: str) -> str:
    if delimiter == ",":
        return f'"{name.replace(chr(34), chr(34) * 2)}"' if re.search(r'[",\r\n]', name) else name
    if re.search(r"[\t\r\n]", name):
        raise DataError(f"a tsv file cannot hold a column {name!r}.", "use a csv file.")
    return name


def _copy_jsonl(source: Path, reading: Any, writing: Any, columns: Columns) -> None:
    """Append values inside the last brace of each line."""
    rows = _rows(source, columns)
    with _as_text(reading) as before, _as_text(writing) as after:
        for line in before:
            body = line.rstrip()
            if body:
                stored = json.loads(body)
                if not isinstance(stored, dict):
                    raise _changed(source)
                _refuse_columns(source, stored, list(columns))
                shown = (None if number is None else float(_show(number)) for number in next(rows))
                added = json.dumps(dict(zip(columns, shown, strict=True)), ensure_ascii=False)
                after.write(f"{body[:-1]}{', ' * bool(stored)}{added[1:]}")
            after.write(line[len(body) :])


def _as_text(stream: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(stream, encoding="utf-8", newline="")


def _copy_parquet(source: Path, reading: Any, writing: Any, columns: Columns) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetFile, ParquetWriter

    with seekable(reading) as stream:
        file = ParquetFile(stream)
        schema = file.schema_arrow
        _refuse_columns(source, schema.names, list(columns))
        added = {name: pyarrow.array(numbers, pyarrow.float64()) for name, numbers in columns.items()}
        for name, numbers in added.items():
            schema = schema.append(pyarrow.field(name, pyarrow.float64()))
            if len(numbers) != file.metadata.num_rows:
                raise _changed(source)
        first = 0
        with ParquetWriter(writing, schema) as writer:
            for batch in file.iter_batches(ROWS_PER_GROUP):
                parts = [numbers.slice(first, len(batch)) for numbers in added.values()]
                writer.write_batch(pyarrow.record_batch([*batch.columns, *parts], schema=schema))
                first += len(batch)


COPIERS: dict[str, Any] = {
    ".csv": _copy_separated,
    ".tsv": _copy_separated,
    ".jsonl": _copy_jsonl,
    ".parquet": _copy_parquet,
}
