from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs radq[serve]")

from serving import Running, make_config, make_models, serving


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Path:
    return make_models(tmp_path_factory.mktemp("served"), toy)


@pytest.fixture(scope="session")
def running(models: Path) -> Iterator[Running]:
    """A server that many tests share."""
    with serving(make_config(models)) as found:
        yield found
