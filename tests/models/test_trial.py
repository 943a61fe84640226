import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radq.models import loading
from radq.models.loading import choose_dtype


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_fastest_of_a_trial_is_taken(
    toy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(4)
    tried = []

    def time_step(lm: torch.nn.Module) -> float:
        tried.append((torch.get_num_threads(), next(lm.parameters()).dtype))
        return 1.0 if tried[-1] == (2, torch.bfloat16) else 2.0

    monkeypatch.setattr(loading, "_time_step", time_step)
    with caplog.at_level(logging.WARNING):
        assert choose_dtype("fastest", toy, "cpu") == "bfloat16"
    assert torch.get_num_threads() == 2
    assert set(tried) == {(n, dtype) for n in (1, 2, 4) for dtype in (torch.float32, torch.bfloat16)}
    assert "bfloat16 with 2 threads is fastest here, by a factor of up to 2.0" in caplog.text


def test_a_real_trial(toy: Path) -> None:
    assert choose_dtype("fastest", toy, "cpu") in ("float32", "bfloat16")


def test_other_data_types_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_try_all", lambda base: pytest.fail("a trial"))
    assert choose_dtype("auto", "nowhere", "cpu") == "auto"
    assert choose_dtype("fastest", "nowhere", "xpu") == "bfloat16"
