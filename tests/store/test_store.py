"""Pieces of a long computation: which are missing, whether the disk has room for them, and how they are written."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from radq.errors import DataError, WriteError
from radq.store import StoredPiece, check_room, load_arrays, missing, save_arrays


def test_a_piece_is_there_when_its_file_has_the_whole_size(tmp_path: Path) -> None:
    whole, part, none = (StoredPiece(tmp_path / name, n, 4) for n, name in enumerate(("whole", "part", "none")))
    whole.file.write_bytes(b"1234")
    part.file.write_bytes(b"123")
    assert missing([whole, part, none]) == [part, none]
    assert StoredPiece(part.file, 1, 4, is_exact=False).is_made  # an estimate says nothing about the file


def test_only_missing_pieces_need_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [StoredPiece(tmp_path / str(n), n, 60) for n in range(3)]
    pieces[0].file.write_bytes(bytes(60))
    full = shutil.disk_usage(tmp_path)._replace(free=120)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    check_room(tmp_path, pieces, "the numbers", "make room.")
    pieces[0].file.unlink()
    with pytest.raises(WriteError, match=r"the numbers need 180 bytes in .*, and 120 bytes are free"):
        check_room(tmp_path, pieces, "the numbers", "make room.")


def test_a_failed_piece_leaves_no_file(tmp_path: Path) -> None:
    piece = StoredPiece(tmp_path / "folder" / "piece", None, 4)

    def write_half() -> None:
        with piece.writing() as temporary:
            temporary.write_bytes(b"12")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert not any(piece.file.parent.iterdir())


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    piece = StoredPiece(tmp_path / "piece.npz", None, 0, is_exact=False)
    save_arrays(piece, one=np.arange(3), two=np.ones((2, 2)))
    found = load_arrays(piece.file, ["two", "one"])
    np.testing.assert_array_equal(found["one"], np.arange(3))
    assert found["two"].shape == (2, 2)
    piece.file.write_bytes(piece.file.read_bytes()[:-40])
    with pytest.raises(DataError, match="is damaged"):
        load_arrays(piece.file, ["one"])
