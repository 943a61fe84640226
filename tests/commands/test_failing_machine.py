"""What a machine can do to a command: a full disk, a closed or broken output, no memory, a key pressed."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_calls import CALLS, find_commands, make_world, write_call
from command_runs import fails, find_errors, odd_files, run_quietly
from instruments import full_disk
from safetensors import SafetensorError
from safetensors.torch import save_file

from radq.cli import main
from radq.commands import score
from radq.errors import MemoryLimitError, OptionError, explain
from radq.files import atomic_file

COMMANDS = find_commands()
WRITERS = [command for command, call in CALLS.items() if "out" in call]
SMALL_WRITERS = [("judge", "train"), ("score",)]  # what they write is smaller than 3000 bytes


@pytest.fixture(scope="module")
def world(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"), toy)


@pytest.mark.parametrize(
    ("command", "free_bytes"),
    [(command, free) for command in WRITERS for free in (0, 3000) if not free or command not in SMALL_WRITERS],
)
def test_a_full_disk_is_one_line(command: tuple[str, ...], free_bytes: int, world: Path) -> None:
    with odd_files() as here:
        argv = write_call(command, COMMANDS[command], CALLS[command], world=world, here=here)
        with full_disk(free_bytes):
            code, error = run_quietly(argv)
    assert code == 2
    (line,) = find_errors(error)
    assert "hint: " in line


def test_what_libraries_say_about_full_disks_and_memory_is_understood(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(5000)}

    def write(save: Callable[[], Any]) -> str | None:
        with full_disk(1000), pytest.raises((OSError, RuntimeError, SafetensorError)) as caught:
            save()
        return explain(caught.value)

    for save in (
        lambda: save_file(tensors, tmp_path / "a.safetensors"),
        lambda: torch.save(tensors, tmp_path / "a.pt"),
        lambda: np.savez(tmp_path / "a.npz", a=np.zeros(5000)),
    ):
        assert "hint: " in (write(save) or "")
    with pytest.raises(MemoryError) as no_memory:
        np.zeros(2**50)
    with pytest.raises(RuntimeError) as no_torch_memory:
        torch.zeros(2**55)
    for caught in (no_memory.value, no_torch_memory.value, torch.OutOfMemoryError("CUDA out of memory. Tried …")):
        assert "memory is full" in (explain(caught) or "")
    assert explain(MemoryLimitError("too much.", "take less.")) == "too much. hint: take less."


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(score, "run", broken)
    with pytest.raises(ZeroDivisionError):
        main(["score", "--reward", "x"])
    assert explain(RuntimeError("shape mismatch")) is None


def test_keys_and_readers_that_stop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for error, code in ((KeyboardInterrupt, 130), (BrokenPipeError, 0)):

        def stopped(arguments: Any, error: type[BaseException] = error) -> None:
            raise error

        monkeypatch.setattr(score, "run", stopped)
        assert main(["score", "--reward", "x"]) == code
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("redirection", "code", "error"),
    [
        ("| true", 0, ""),
        (">&-", 0, ""),
        ("> /dev/full", 2, "error: No space left on device. hint: make room on the disk.\n"),
    ],
)
def test_outputs_that_take_nothing(redirection: str, code: int, error: str) -> None:
    """Of a command that writes more than a pipe buffers; `pipefail` makes the shell tell radq's exit code."""
    program = f"{sys.executable} -c 'import sys; from radq.cli import main; sys.exit(main([\"--help\"]))'"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {program} {redirection}"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, error)


def test_outputs_that_cannot_write_a_character(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    assert main(["score", "--reward", str(world / "q"), "the film ünd"]) == 0
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["score", "--reward", str(world / "q"), "the film", "--json"]) == 0
    sys.stdout.close()


def test_bytes_that_are_no_text(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must be UTF-8" in fails(capsys, "score", os.fsdecode(b"\xff"), "--reward", str(world / "q"))
    (tmp_path / "prompts.txt").write_bytes(b"caf\xe9\n")
    argv = ["generate", "--base", str(world / "toy"), "--prompts", str(tmp_path / "prompts.txt")]
    assert "is not a text file" in fails(capsys, *argv)


@pytest.mark.parametrize("device", ["cuda:9", "meta", "abacus", ""])
def test_devices_that_are_not_there(device: str, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert device in fails(capsys, "score", "--reward", str(world / "q"), "a", "--device", device)


def test_half_precision_on_any_cpu(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for dtype in ("bfloat16", "float16"):
        argv = ["generate", "--base", str(world / "toy"), "--guide", f"{world / 'v'}:praise=3", "--prompt", "the film"]
        assert main([*argv, "--dtype", dtype, "--json"]) == 0
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [("convert",), ("judge", "train"), ("eval", "sweep")], ids=" ".join)
def test_folders_of_others_are_not_overwritten(command: tuple[str, ...], world: Path, toy: Path) -> None:
    """Neither a language model, nor a training run, whose files are named like some of a sweep's."""
    for files in ({"config.json": '{"model_type": "gpt2"}'}, {"config.yaml": "labels: praise\n", "metrics.jsonl": ""}):
        with odd_files() as here:
            (here / "out").mkdir()
            for name, text in files.items():
                (here / "out" / name).write_text(text)
            argv = write_call(command, COMMANDS[command], CALLS[command], world=world, here=here)
            code, error = run_quietly([*argv, "--overwrite"])
            assert code == 2
            assert "is a folder that holds other files" in error
            assert {file.name: file.read_text() for file in (here / "out").iterdir()} == files


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "5", "base: [", "\x00\x01", None])
def test_configurations_that_are_none(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        (tmp_path / "sweep.yaml").write_text(text)
    error = fails(capsys, "eval", "--config", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out"))
    assert "sweep.yaml" in error


def test_a_report_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert str(folder) in fails(capsys, "report", str(folder))


def test_a_key_pressed_while_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("radq.cli.importlib.import_module", interrupted)
    assert main(["score"]) == 130


def test_a_pipe_or_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match=r"pipe' is a device or a pipe"), atomic_file(tmp_path / "pipe") as temporary:
        temporary.write_text("text")
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 1
