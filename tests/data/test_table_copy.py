"""A copy of a table with more columns: all that was there stays, byte by byte or value by value."""

import csv
import gzip
import lzma
from pathlib import Path

import pandas
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radq.data.table_copy import check_copy, copy_with_columns, name_copy
from radq.data.tables import read_table
from radq.errors import DataError, OptionError, WriteError

CASES = {
    "a.csv": (b"text,n\nfilm,1\nplot,2\n", b"text,n,r\nfilm,1,0.5\nplot,2,\n"),
    "b.csv": (  # a mark of Excel, ends of lines of Windows, quotes, lines in a cell, blank lines, no last end
        b'\xef\xbb\xbf"text",n\r\n\r\n"a ""b"",\r\n\r\nc",1.50\r\n\n\'x,"2"',
        b'\xef\xbb\xbf"text",n,r\r\n\r\n"a ""b"",\r\n\r\nc",1.50,0.5\r\n\n\'x,"2",',
    ),
    "c.tsv": (b'text\tn\n"film\t1\n\nplot \t 2\n', b'text\tn\tr\n"film\t1\t0.5\n\nplot \t 2\t\n'),
    "d.jsonl": (
        b'{"text": "\\u00e4 }", "n": 1.50}\r\n\n {"text":"x","n":{"a": [1]} }',
        b'{"text": "\\u00e4 }", "n": 1.50, "r": 0.5}\r\n\n {"text":"x","n":{"a": [1]} , "r": null}',
    ),
}
ENDINGS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
ENDINGS[".zst"] = lambda data: pyarrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", CASES)
def test_bytes_stay(name: str, ending: str, tmp_path: Path) -> None:
    before, after = CASES[name]
    source, target = tmp_path / f"{name}{ending}", tmp_path / f"copy{Path(name).suffix}"
    source.write_bytes(ENDINGS[ending](before))
    copy_with_columns(source, target, {"r": [0.5, None]})
    assert target.read_bytes() == after
    packed = name_copy(source)
    copy_with_columns(source, packed, {"r": [0.5, None]})
    assert packed.name == f"{Path(name).stem}.scored{Path(name).suffix}{ending}"
    columns = [list(table.columns) for table in read_table(packed)]
    assert columns[0] == ["text", "n", "r"]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(st.tuples(st.text(), st.text(), st.none() | st.floats(-9, 9)), max_size=5),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_copies_of_any_csv_have_the_same_rows(rows: list[tuple], end: str, tmp_path: Path) -> None:
    texts = [[text.encode(errors="replace").decode() for text in row[:2]] for row in rows]
    table = pandas.DataFrame(texts, columns=["a, b", "c"])
    table.to_csv(tmp_path / "any.csv", index=False, lineterminator=end, quoting=csv.QUOTE_ALL)
    columns = {"x": [row[2] for row in rows], 'y"': [0.1] * len(rows)}
    copy_with_columns(tmp_path / "any.csv", tmp_path / "out.csv", columns)
    (found,) = read_table(tmp_path / "out.csv")
    assert list(found.columns) == ["a, b", "c", "x", 'y"']
    assert found[["a, b", "c"]].to_numpy().tolist() == next(read_table(tmp_path / "any.csv")).to_numpy().tolist()
    assert found["x"].tolist() == ["" if row[2] is None else f"{row[2]:.6g}" for row in rows]


def test_types_of_parquet_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radq.data.table_copy.ROWS_PER_GROUP", 2)
    columns = {
        "text": pyarrow.array(["a", None, "c"]).dictionary_encode(),
        "small": pyarrow.array([1, 2, None], pyarrow.int8()),
        "deep": pyarrow.array([[{"x": 1}], [], None]),
        "day": pyarrow.array([1, 2, 3], pyarrow.date32()),
    }
    table = pyarrow.table(columns).replace_schema_metadata({"made": "by hand"})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    copy_with_columns(tmp_path / "a.parquet", tmp_path / "b.parquet", {"r": [0.25, None, 1.0]})
    found = pyarrow.parquet.read_table(tmp_path / "b.parquet")
    assert found.drop_columns("r").equals(pyarrow.parquet.read_table(tmp_path / "a.parquet"))
    assert found.schema.metadata[b"made"] == b"by hand"
    assert found["r"].to_pylist() == [0.25, None, 1.0]


def test_mistakes_are_found_before_any_work(tmp_path: Path) -> None:
    source = tmp_path / "a.csv"
    source.write_text("text,r\nfilm,1\n")
    (tmp_path / "there.csv").touch()
    (tmp_path / "folder.csv").mkdir()
    for target, kind, message in [
        ("b.tsv", OptionError, "must be of the format of 'a.csv'"),
        ("b.txt", DataError, "no ending"),
        ("there.csv", OptionError, "exists.*--overwrite"),
        ("folder.csv", OptionError, "is a folder"),
        ("a.csv", OptionError, "is the file that is read"),
    ]:
        with pytest.raises(kind, match=message):
            check_copy(source, tmp_path / target, ["x"], overwrite=target == "a.csv")
    with pytest.raises(DataError, match="has a column 'r' already"):
        check_copy(source, tmp_path / "b.csv", ["r"], overwrite=False)
    with pytest.raises(DataError, match="no file"):
        check_copy(tmp_path / "missing.csv", tmp_path / "b.csv", ["r"], overwrite=False)
    check_copy(source, tmp_path / "there.csv", ["x"], overwrite=True)


def test_a_failure_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "film"}\n{"text": "plot", "r": 1}\n')
    (tmp_path / "a.tsv").write_text("text\nfilm\n")
    for name, numbers, message in [
        ("a.jsonl", [1.0, 2.0], "has a column 'r' already"),  # of the second row alone
        ("a.tsv", [], "has changed while it was read"),
    ]:
        with pytest.raises(DataError, match=message):
            copy_with_columns(tmp_path / name, tmp_path / f"out-{name}", {"r": numbers})
    with pytest.raises(DataError, match="cannot hold a column"):
        copy_with_columns(tmp_path / "a.tsv", tmp_path / "out-a.tsv", {"r\t": [1.0]})
    monkeypatch.setattr("radq.data.table_copy._show", _full)
    with pytest.raises(WriteError, match="out-a.tsv"):
        copy_with_columns(tmp_path / "a.tsv", tmp_path / "out-a.tsv", {"r": [1.0]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.tsv"]


def _full(number: float) -> str:
    raise OSError(28, "No space left on device")
