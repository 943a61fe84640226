"""Models whose files differ anywhere have other fingerprints, and files are read once."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from radq import files
from radq.files import SETTLED, remember
from radq.models.kinds import RadQ
from radq.sources.model_source import ModelSource

HOUR = 3600


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def change_in_place(file: Path, place: int) -> None:
    """Change one byte; place, size, inode and time of the last change stay as they are."""
    times = file.stat()
    with file.open("r+b") as stream:
        stream.seek(place % times.st_size)
        byte = stream.read(1)
        stream.seek(place % times.st_size)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_every_tensor_of_a_large_file_counts(tmp_path: Path) -> None:
    tensors = {name: torch.randn(300, 1000) for name in ("embedding", "layer", "norm", "unembedding")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    before = ModelSource.find(tmp_path).fingerprint
    for name in tensors:
        changed = load_file(tmp_path / "model.safetensors")
        changed[name][150, 500] += 1
        save_file(changed, tmp_path / "model.safetensors")
        assert ModelSource.find(tmp_path).fingerprint != before, name
    save_file(tensors, tmp_path / "model.safetensors")
    assert ModelSource.find(tmp_path).fingerprint == before


@pytest.mark.parametrize(
    "name", ["config.json", "model.onnx", "model.onnx_data", "tokenizer.model", "chat_template.jinja", "vocab.txt"]
)
def test_every_file_that_answers_depend_on_counts(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("one")
    before = ModelSource.find(tmp_path).fingerprint
    (tmp_path / name).write_text("two")
    assert ModelSource.find(tmp_path).fingerprint != before


@pytest.mark.parametrize("name", ["calibration.json", "README.md", "results.json", "metrics.jsonl", "checkpoint-5/x"])
def test_what_is_written_about_a_model_does_not_count(toy: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(toy, tmp_path / "elsewhere")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("0.9")
    assert ModelSource.find(folder).fingerprint == ModelSource.find(toy).fingerprint


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["lora", "readout"])
def test_the_backbone_beside_which_a_reward_model_stands_counts(
    kind: str, file: str, toy: Path, tmp_path: Path
) -> None:
    shutil.copytree(toy, tmp_path / "base")
    if kind == "readout":
        model = RadQ.from_base(tmp_path / "base", ["praise"])
    else:
        model = RadQ.from_backbone(tmp_path / "base", ["praise"])
        model.add_lora(2, str(tmp_path / "base"))
    model.save_pretrained(tmp_path / "guide")
    before = ModelSource.find(tmp_path / "guide").fingerprint
    assert ModelSource.find(tmp_path / "guide").fingerprint == before
    change_in_place(tmp_path / "base" / file, -1 if file == "model.safetensors" else 1)
    assert ModelSource.find(tmp_path / "guide").fingerprint != before


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], bool]:
    """Whether a question about a file makes radq read it."""
    monkeypatch.setattr(files, "SETTLED", -HOUR)  # files of this test are as good as old
    calls: list[Path] = []

    def ask(file: Path) -> bool:
        calls.clear()

        def answer() -> str:
            calls.append(file)
            return file.read_text()

        assert remember("text", [file], answer) == file.read_text()
        return bool(calls)

    return ask


def test_a_file_is_read_again_only_if_it_has_changed(tmp_path: Path, asked: Callable[[Path], bool]) -> None:
    file = tmp_path / "file"
    file.write_text("hello")
    assert asked(file)
    assert not asked(file)
    change_in_place(file, 2)  # of which only the time of the inode tells
    assert asked(file)
    shutil.copy2(file, tmp_path / "copy")
    (tmp_path / "copy").replace(file)
    assert asked(file)
    assert not asked(file)


def test_an_answer_about_a_file_that_may_still_change_unnoticed_is_not_kept(tmp_path: Path) -> None:
    file, answers = tmp_path / "file", iter("12")
    file.write_text("new")
    assert SETTLED > 1
    assert [remember("text", [file], lambda: next(answers)) for _ in range(2)] == ["1", "2"]


def test_without_a_cache_files_are_read_each_time(
    tmp_path: Path, asked: Callable[[Path], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("hello")
    (tmp_path / "no-folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-folder"))
    assert asked(tmp_path / "file")
    assert asked(tmp_path / "file")
