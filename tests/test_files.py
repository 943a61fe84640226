"""Folders that are written completely or not at all, also if another process writes the same one."""

from pathlib import Path

import pytest

from radq.files import atomic_file, atomic_folder


def write(folder: Path, content: str, *names: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(content)


def read(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_a_folder_that_another_process_has_finished_meanwhile_stays(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "made", proof="last") as temporary:
        write(temporary, "mine", "first", "last")
        write(tmp_path / "made", "theirs", "first", "last")
    assert read(tmp_path / "made") == {"first": "theirs", "last": "theirs"}
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_folder_without_its_last_file_is_made_again(tmp_path: Path) -> None:
    write(tmp_path / "made", "theirs", "first")
    with atomic_folder(tmp_path / "made", proof="last") as temporary:
        write(temporary, "mine", "first", "last")
    assert read(tmp_path / "made") == {"first": "mine", "last": "mine"}


def test_a_folder_that_appears_at_the_last_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def rename_late(source: Path, target: Path) -> Path:
        if target == tmp_path / "made":
            write(target, "theirs", "last")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", rename_late)
    with atomic_folder(tmp_path / "made", proof="last") as temporary:
        write(temporary, "mine", "last")
    assert read(tmp_path / "made") == {"last": "theirs"}


def test_a_file_that_two_write_at_once_is_whole(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "made") as mine, atomic_file(tmp_path / "made") as theirs:
        mine.write_text("mine")
        theirs.write_text("theirs")
        assert mine.read_text() == "mine"
    assert read(tmp_path) == {"made": "mine"}


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    write(tmp_path / "made", "old", "model", "shard", "notes")
    with atomic_folder(tmp_path / "made", replaces=["sha*"]) as temporary:
        write(temporary, "new", "model")
    assert read(tmp_path / "made") == {"model": "new", "notes": "old"}
