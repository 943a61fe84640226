"""The study's modules, which are scripts beside one another and no package."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

STUDY = Path(__file__).parents[2] / "study"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    names = [file.stem for file in STUDY.glob("*.py")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDY)
        yield {name: __import__(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)
