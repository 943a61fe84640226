"""Rows of a program become a file with the same cells, read once and without holding them all."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from radq.data.tables import read_table, store_rows
from radq.errors import DataError, OptionError
from radq.toy import make_reviews

ROWS = [{"text": text, "praise": praise, "more": 0} for text, praise in make_reviews(30)]
NAMES = ["text", "praise"]
PARTLY = [{"text": "a", "y": 1}, {"text": "b"}]


def read(file: Path) -> list[dict[str, Any]]:
    return [row for table in read_table(file) for row in table.to_dict("records")]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        iter(ROWS),
        pandas.DataFrame(ROWS),
        {name: [row[name] for row in ROWS] for name in NAMES},
        {"text": np.array([row["text"] for row in ROWS]), "praise": np.array([row["praise"] for row in ROWS])},
    ],
    ids=["list", "iterator", "frame", "columns", "arrays"],
)
def test_every_form_of_rows_is_the_same_file(rows: Any, tmp_path: Path) -> None:
    file = store_rows(rows, NAMES, tmp_path)
    assert read(file) == [{name: row[name] for name in NAMES} for row in ROWS]
    assert store_rows(ROWS, NAMES, tmp_path) == file
    assert list((tmp_path / "rows").iterdir()) == [file]


def test_runs_in_one_cache_do_not_mix_their_rows(tmp_path: Path) -> None:
    """Not even processes of one number, as containers have them, each of which reads its rows slowly."""

    def slowly(rows: list[dict[str, Any]], between: list[Path]) -> Iterator[dict[str, Any]]:
        yield from rows[:10]
        between.append(store_rows(ROWS[5:], NAMES, tmp_path))  # another run begins and ends meanwhile
        yield from rows[10:]

    between: list[Path] = []
    file = store_rows(slowly(ROWS, between), NAMES, tmp_path)
    for found, rows in ((file, ROWS), (between[0], ROWS[5:])):
        assert read(found) == [{name: row[name] for name in NAMES} for row in rows]
    assert sorted((tmp_path / "rows").iterdir()) == sorted([file, *between])


def test_lists_words_and_missing_cells_stay_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"text": [{"role": "user", "content": "é"}], "y": True},
        {"text": "NA", "y": np.float32(0.5)},
        {"text": None, "y": float("nan")},
    ]
    found = read(store_rows(rows, ["text", "y"], tmp_path))
    assert [row["text"] for row in found][:2] == [rows[0]["text"], "NA"]
    assert [row["y"] for row in found][:2] == [True, 0.5]
    assert pandas.isna(found[2]["text"])
    assert pandas.isna(found[2]["y"])


class Row(dict[str, Any]):
    """A row that can be watched: plain dictionaries have no weak references."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]


def test_a_stream_is_not_held_in_memory(tmp_path: Path) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    def stream() -> Iterator[Row]:
        nonlocal most
        for number in range(2_000):
            row = Row(text=f"film {number}", praise=0)
            alive.add(row)
            most = max(most, len(alive))
            yield row

    assert len(read(store_rows(stream(), NAMES, tmp_path))) == 2_000
    assert most < 10


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([{"text": "film"}], "no column 'praise'"),
        ({"train": ROWS, "test": ROWS}, "no column 'text'.*it has train, test"),
        (pandas.DataFrame({"text": ["film"]}), "no column 'praise'"),
        (["film"], "row 1 of the data is a str"),
        ([ROWS[0], {"text": {1, 2}, "praise": 0}], "row 2 of the data: .*set"),
    ],
)
def test_wrong_rows_are_named(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        store_rows(rows, NAMES, tmp_path)
    assert not list((tmp_path / "rows").iterdir())


@pytest.mark.parametrize("rows", ["reviews.csv", 3])
def test_data_that_is_no_rows_is_refused(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="data must be rows"):
        store_rows(rows, NAMES, tmp_path)


def test_a_data_set_of_the_package_datasets_streamed_or_not(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    file = store_rows(data, NAMES, tmp_path)
    assert store_rows(data.to_iterable_dataset(num_shards=3), NAMES, tmp_path) == file
    assert read(file) == [{name: row[name] for name in NAMES} for row in ROWS]


@pytest.mark.parametrize("rows", [PARTLY, PARTLY[::-1], pandas.DataFrame(PARTLY)], ids=["list", "turned", "frame"])
def test_optional_columns_may_be_absent(rows: Any, tmp_path: Path) -> None:
    found = {
        row["text"]: (row["y"], row["z"])
        for row in read(store_rows(rows, ["text", "y", "z"], tmp_path, optional=["y", "z"]))
    }
    assert found["a"][0] == 1
    assert found["b"][0] != found["b"][0] or found["b"][0] is None
    with pytest.raises(DataError, match="no column 'z'"):
        store_rows(rows, ["text", "y", "z"], tmp_path, optional=["y"])
