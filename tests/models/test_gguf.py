"""GGUF files; tests/models/test_embedded.py converts a real one."""

from pathlib import Path

import pytest

from radq.errors import ModelError
from radq.models.gguf import convert_gguf


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file .*small\.gguf"):
        convert_gguf(tmp_path / "small.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
