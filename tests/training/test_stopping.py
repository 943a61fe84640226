"""Checkpoints by the clock and at Ctrl-C, and going on from them."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import make_settings, weights

from radq.cli import main
from radq.errors import MemoryLimitError
from radq.training.config import RewardTrainingConfig
from radq.training.reward import train
from radq.training.reward_trainer import RewardTrainer
from radq.training.run_folder import find_checkpoints
from radq.training.trainer_setup import SavingCallback


@pytest.fixture
def settings(calm_toy: Path, tmp_path: Path) -> RewardTrainingConfig:
    return make_settings(tmp_path, 64, calm_toy, labels="praise", num_layers=1, batch_size=8, max_steps=6)


def press_ctrl_c_in_step(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process SIGINT in a step, as a terminal does."""
    usual = RewardTrainer.training_step

    def step(self: RewardTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.state.global_step + 1 == number:
            os.kill(os.getpid(), signal.SIGINT)
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(RewardTrainer, "training_step", step)


def test_ctrl_c_saves_and_the_run_goes_on_to_the_same_weights(
    settings: RewardTrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [part for name in ("labels", "backbone", "out", "cache") for part in (f"--{name}", getattr(settings, name))]
    argv += ["--data", *settings.data, "--num-layers", "1", "--batch-size", "8", "--max-steps", "6"]
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        press_ctrl_c_in_step(3, patch)
        assert main(["train", *argv]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    said = capfd.readouterr().err
    assert "stopping after this step with a checkpoint" in said
    assert f"stopped after step 3 of 6; the last good checkpoint is '{settings.out}/checkpoint-3'" in said
    assert f"go on with --resume --out {settings.out}" in said
    assert [path.name for path in find_checkpoints(settings.out)] == ["checkpoint-3"]
    assert main(["train", "--resume", "--out", settings.out]) == 0
    whole = RewardTrainingConfig(**(vars(settings) | {"out": str(tmp_path / "whole")}))
    train(whole)
    for name, values in weights(whole.out).items():
        assert torch.equal(values, weights(settings.out)[name])


def test_a_second_ctrl_c_stops_at_once() -> None:
    saving = SavingCallback(5)
    with saving.stopped_by_signals():
        os.kill(os.getpid(), signal.SIGINT)
        assert saving.stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_ctrl_c_in_the_last_step_changes_nothing(
    settings: RewardTrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    press_ctrl_c_in_step(6, monkeypatch)
    assert "train_loss" in train(settings)


def test_checkpoints_are_saved_by_the_clock(settings: RewardTrainingConfig) -> None:
    train(RewardTrainingConfig(**(vars(settings) | {"save_minutes": 1e-9})))
    assert [path.name for path in find_checkpoints(settings.out)] == ["checkpoint-5", "checkpoint-6"]


def test_nothing_to_go_on_from_is_said(settings: RewardTrainingConfig) -> None:
    with pytest.warns(UserWarning, match="has no checkpoint to go on from: training starts at the beginning"):
        train(settings, resume=True)


@pytest.mark.parametrize("change", [{"eval_steps": 3}, {"eval_steps": 2, "metric": "loss"}, {}])
def test_the_last_weights_are_evaluated_once(
    change: dict[str, Any], settings: RewardTrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    usual = RewardTrainer.evaluate

    def evaluate(self: RewardTrainer, *args: Any, **kwargs: Any) -> dict[str, float]:
        steps.append(self.state.global_step)
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(RewardTrainer, "evaluate", evaluate)
    metrics = train(RewardTrainingConfig(**(vars(settings) | change)))
    assert steps == {3: [3, 6], 2: [2, 4, 6], None: [6]}[change.get("eval_steps")]
    assert metrics["eval_samples_per_second"] > 0
    assert "eval_weighted_mse" in metrics


@pytest.mark.slow
def test_the_estimate_of_the_time_does_not_change_the_run(
    settings: RewardTrainingConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(settings)
    loud = RewardTrainingConfig(**(vars(settings) | {"out": str(tmp_path / "loud")}))
    train(loud, progress=True)
    assert "on this machine" in capsys.readouterr().out
    for name, values in weights(settings.out).items():
        assert torch.equal(values, weights(loud.out)[name])


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), MemoryLimitError("no memory.", "use less.")],
    ids=["gpu", "cpu", "radq"],
)
def test_full_memory_saves_and_the_run_goes_on_to_the_same_weights(
    error: Exception, settings: RewardTrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is full in the second half of the fourth step."""
    usual, calls = RewardTrainer.add_gradients, []

    def step(self: RewardTrainer, *args: Any) -> torch.Tensor:
        calls.append(self.state.global_step)
        if calls.count(3) == 2:
            raise error
        return usual(self, *args)

    halves = RewardTrainingConfig(**(vars(settings) | {"micro_batch_size": 4}))
    with monkeypatch.context() as patch:
        patch.setattr(RewardTrainer, "add_gradients", step)
        with pytest.raises(MemoryLimitError) as raised:
            train(halves)
    assert re.search(
        r"memory is full in step 4 of 6: .*; the last good checkpoint is '.*/checkpoint-3'", str(raised.value)
    )
    assert f"go on with --resume --out {settings.out} and --micro-batch-size 2, which needs less." in str(raised.value)
    assert str(raised.value).count("hint: ") == 1
    train(halves, resume=True)
    whole = RewardTrainingConfig(**(vars(halves) | {"out": str(tmp_path / "whole")}))
    train(whole)
    for name, values in weights(whole.out).items():
        assert torch.equal(values, weights(settings.out)[name])


def test_full_memory_in_the_first_step_saves_nothing(
    settings: RewardTrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = RewardTrainingConfig(**(vars(settings) | {"micro_batch_size": 1}))
    error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    monkeypatch.setattr(RewardTrainer, "add_gradients", raise_error(error))
    with pytest.raises(MemoryLimitError, match="step 1 of 6.*no checkpoint yet.*and nothing else in the memory"):
        train(single)
    assert find_checkpoints(settings.out) == []


def test_other_errors_of_a_step_stay_as_they_are(
    settings: RewardTrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RewardTrainer, "add_gradients", raise_error(RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="^shapes do not fit$"):
        train(settings)


def raise_error(error: Exception) -> Any:
    def fail(*_: Any) -> None:
        raise error

    return fail
