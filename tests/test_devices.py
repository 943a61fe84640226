"""Devices: the accelerator is taken where torch has one, and no helper asks for a kind of card that is not there."""

from types import SimpleNamespace

import pytest
import torch

from radq import numerics
from radq.errors import OptionError, explain
from radq.models.loading import find_device


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", "cpu"])
def test_auto_is_the_accelerator_of_this_machine(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = None if kind == "cpu" else torch.device(kind)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: found)
    assert find_device("auto") == kind
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("meta"))
    assert find_device("auto") == "cpu"


def test_devices_that_are_not_there_are_named() -> None:
    assert find_device("cpu") == "cpu"
    for name in ("cuda:99", "hpu", "nowhere", "", "a\0b", "cuda:-1"):
        with pytest.raises(OptionError, match="no device|does not compute"):
            find_device(name)
    with pytest.raises(OptionError, match="does not compute on 'meta'"):
        find_device("meta")


def test_a_device_without_memory_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(RuntimeError) as caught:
        find_device("cuda")
    assert str(explain(caught.value)).startswith("memory is full: CUDA error: out of memory.")


def test_memory_is_asked_of_the_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(mem_get_info=lambda device: (7, 9))
    monkeypatch.setattr(torch, "xpu", card)
    monkeypatch.setattr(torch, "cuda", card)
    monkeypatch.setattr("torch.accelerator.max_memory_allocated", lambda device: 5)
    resets: list[str] = []
    monkeypatch.setattr("torch.accelerator.reset_peak_memory_stats", resets.append)
    for kind in ("cuda", "xpu", "cuda:1"):
        assert numerics.available_memory(kind) == 7
        assert numerics.peak_memory(kind) == 5
        numerics.reset_peak_memory(kind)
    assert resets == ["cuda", "xpu", "cuda:1"]
    apple = SimpleNamespace(recommended_max_memory=lambda: 9, driver_allocated_memory=lambda: 4)
    monkeypatch.setattr(torch, "mps", apple)
    assert (numerics.available_memory("mps"), numerics.peak_memory("mps")) == (5, 4)
    for kind in ("mps", "cpu"):
        numerics.reset_peak_memory(kind)
    numerics.empty_cache()
    assert numerics.peak_memory("cpu") > 0
