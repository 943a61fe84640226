"""Scripts and examples that run inside the test process, which has imported torch and transformers already."""

import contextlib
import io
import runpy
from pathlib import Path

import pytest


def run_script(file: Path, *argv: str, folder: Path) -> str:
    """Run `python file argv` in a folder, and return what it prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr("sys.argv", [str(file), *argv])
        patch.syspath_prepend(str(file.parent))
        runpy.run_path(str(file), run_name="__main__")
    return printed.getvalue()
