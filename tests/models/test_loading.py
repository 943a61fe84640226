"""Language models in the data type in which a machine computes well."""

from pathlib import Path

import pytest
import torch

from radq import RewardModel, load
from radq.models import loading
from radq.models.kinds import RadQ
from radq.models.loading import load_causal_lm
from radq.numerics import emulates

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that emulates both halves."""
    monkeypatch.setattr(loading, "emulates", lambda dtype, device: device == "cpu" and dtype in HALVES)


@pytest.fixture(params=HALVES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def half(dtype: torch.dtype, toy: Path, tmp_path: Path) -> Path:
    """A language model that is stored in a half precision."""
    lm, tokenizer = load(toy, device="cpu", dtype=dtype)
    lm.save_pretrained(tmp_path / "half")
    tokenizer.save_pretrained(tmp_path / "half")
    return tmp_path / "half"


@pytest.mark.usefixtures("without_instructions")
def test_a_cpu_without_instructions_computes_in_float32(
    half: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    lm, _ = load(half, device="cpu")
    stored, _ = load(half, device="cpu", dtype=dtype)
    assert {one.dtype for one in lm.parameters()} == {torch.float32}
    assert stored.dtype == dtype  # one that is given is taken
    assert all(torch.equal(one, two.float()) for one, two in zip(lm.parameters(), stored.parameters(), strict=True))
    assert "emulates slowly, so it computes in float32. Give a dtype to choose." in caplog.text
    assert caplog.text.count("emulates") == 1


@pytest.mark.usefixtures("without_instructions")
def test_a_quantised_model_stays_as_it_is(half: Path, dtype: torch.dtype) -> None:
    lm, _ = load(half, device="cpu", dtype=dtype)
    lm.is_quantized = True
    assert loading.to_device(lm, half, "cpu", "auto").dtype == dtype


def test_a_cpu_with_instructions_computes_in_the_stored_type(
    half: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "emulates", lambda dtype, device: False)
    assert load(half, device="cpu")[0].dtype == dtype


@pytest.mark.usefixtures("without_instructions")
def test_reward_models_likewise(toy: Path, tmp_path: Path) -> None:
    RadQ.from_backbone(toy, ["praise"], num_layers=1, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    assert RewardModel.from_pretrained(tmp_path / "half", "cpu").dtype == torch.float32
    assert RewardModel.from_pretrained(tmp_path / "half", "cpu", dtype="auto").dtype == torch.float32
    assert RewardModel.from_pretrained(tmp_path / "half", "cpu", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_model_that_goes_to_a_gpu_keeps_its_type(
    half: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device it comes to the CPU first, from where it is moved, if there is a GPU."""
    asked: list[str] = []
    monkeypatch.setattr(loading, "emulates", lambda dtype, device: bool(asked.append(device)))
    monkeypatch.setattr(loading, "find_device", lambda name: "cuda")
    assert load_causal_lm(half).dtype == dtype
    assert asked == ["cuda"]


def test_what_a_cpu_emulates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU is trusted with float16, nor with bfloat16 without oneDNN; GPUs and float32 are never emulated."""
    assert emulates(torch.float16, "cpu")
    assert isinstance(emulates(torch.bfloat16, torch.device("cpu")), bool)
    assert not emulates(torch.float32, "cpu")
    assert not emulates(torch.float16, "cuda:1")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert emulates(torch.bfloat16, "cpu")
