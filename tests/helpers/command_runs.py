"""Run the command line inside the test process, in a folder with files that radq did not write."""

import contextlib
import io
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from radq.cli import main


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail with exit code 2, and return its error, the last line on standard error.

    Lines before it may only say what the command has begun to do.
    """
    assert main(list(argv)) == 2
    *begun, line = capsys.readouterr().err.splitlines()
    assert all(text.endswith("…") for text in begun)
    assert line.startswith("error: ")
    assert "hint: " in line
    return line


@contextlib.contextmanager
def odd_files() -> Iterator[Path]:
    """Work in a temporary folder with files of many kinds that radq did not write."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        for folder in ("folder", "locked"):
            (here / folder).mkdir()
        (here / "folder/notes.txt").write_text("mine")
        (here / "locked").chmod(0o500)
        for file in ("empty", "empty.csv", "empty.jsonl"):
            (here / file).touch()
        for file in ("binary", "binary.csv", "binary.jsonl", "binary.parquet", "binary.npz", "binary.safetensors"):
            (here / file).write_bytes(bytes(range(256)) * 3)
        (here / "list.yaml").write_text("- 1\n- two\n")
        (here / "list.jsonl").write_text("[1, 2]\nnull\n")
        (here / "numbers.jsonl").write_text('{"text": 1, "praise": "x", "continuations": 3}\n')
        (here / "text.txt").write_text("a line\n\nanother\n")
        (here / "text.csv").write_text("text,praise\nfilm\n,\nplot,1,2\n")
        os.chdir(here)
        try:
            yield here
        finally:
            os.chdir(before)
            (here / "locked").chmod(0o700)


def run_quietly(argv: list[str]) -> tuple[int, str]:
    """Run a command; return its exit code and standard error. Warnings are ignored."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            code = main(argv)
        except SystemExit as stop:  # tyro has found the mistake, or shows help
            code = int(stop.code or 0)
            return code, "error: tyro shows it in a box"
    err.flush()
    return code, err.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]


def find_errors(text: str) -> list[str]:
    """Find the error messages in the output. A progress bar may stand before one, in the same line."""
    return re.findall(r"(?:^|[\r\n\]]|\x1b\[A)error: (.{6,})", text)  # the last one moves the cursor up
