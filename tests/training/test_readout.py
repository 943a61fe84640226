"""Training of readouts: only they and the head learn, and the base model stays as it is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import changed, losses, weights

from radq.cli import main
from radq.errors import OptionError
from radq.models.rad_q import RadQ
from radq.models.reward import RewardModel
from radq.training.checkpoints import find_checkpoints
from radq.training.config import RewardTrainingConfig
from radq.training.reward import train


@pytest.fixture
def settings(settings: RewardTrainingConfig) -> RewardTrainingConfig:
    return changed(settings, reads="base", readout_layers=2, readout_width=24, learning_rate=3e-3, eval_share=0.2)


def test_a_readout_learns_and_its_base_model_does_not(settings: RewardTrainingConfig, calm_toy: Path) -> None:
    train(changed(settings, epochs=5, learning_rate=1e-2, reg_weight=0.1))
    found = losses(settings.out)
    assert np.mean(found[-10:]) < 0.7 * np.mean(found[:10])
    saved = weights(settings.out)
    assert {name.split(".")[0] for name in saved} == {"readout", "head"}
    model = RewardModel.from_pretrained(settings.out)
    before = RadQ.from_base(calm_toy, ["praise"])
    for name, weight in before.backbone.state_dict().items():
        assert torch.equal(model.backbone.state_dict()[name], weight)


def test_a_run_goes_on_from_its_checkpoint(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    train(changed(settings, max_steps=6))
    halves = changed(settings, out=str(tmp_path / "halves"), max_steps=6, save_steps=3)
    train(halves)
    last = find_checkpoints(tmp_path / "halves")[-1]
    assert last.name == "checkpoint-6"
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    train(halves, resume=True)
    assert losses(tmp_path / "halves")[-1] == losses(settings.out)[-1]
    one, other = weights(settings.out), weights(tmp_path / "halves")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_teacher_is_distilled_into_a_readout(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    plain: dict[str, Any] = {"reads": "itself", "readout_layers": None, "readout_width": None}
    train(changed(settings, kind="v", out=str(tmp_path / "v"), **plain))
    metrics = train(changed(settings, teacher=str(tmp_path / "v"), epochs=8))
    assert metrics["eval_distillation_mse"] < 0.5 * metrics["eval_constant_distillation_mse"]


@pytest.mark.slow
def test_a_readout_learns_candidates_of_its_base_model(
    settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    plain: dict[str, Any] = {"reads": "itself", "readout_layers": None, "readout_width": None}
    train(changed(settings, kind="v", out=str(tmp_path / "v"), epochs=3, **plain))
    student: dict[str, Any] = {"teacher": str(tmp_path / "v"), "base": str(calm_toy), "num_prefixes": 128}
    student |= {"learning_rate": 1e-2, "epochs": 4, "prompt_tokens": 2, "prefix_tokens": 8, "candidates": 10}
    found = train(changed(settings, **student))
    assert found["eval_candidate_correlation"] > 0.5
    assert found["eval_candidate_error"] < found["eval_constant_candidate_error"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "v"}, "kind and reads=base"),
        ({"lora_rank": 4}, "lora_rank and reads=base"),
        ({"num_layers": 1}, "num_layers and reads=base"),
        ({"backbone": "", "init": "x"}, "no base model"),
        ({"reads": "itself"}, "readout_layers is for readouts"),
        ({"readout_layers": 9}, "from 1 to 2"),
    ],
)
def test_settings_that_contradict_a_readout(wrong: dict[str, Any], said: str, settings: RewardTrainingConfig) -> None:
    with pytest.raises(OptionError, match=said):
        train(changed(settings, **wrong))
    assert not Path(settings.out).exists()


def test_the_command_trains_scores_and_steers(
    settings: RewardTrainingConfig, calm_toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [part for name in ("labels", "backbone", "out", "cache") for part in (f"--{name}", getattr(settings, name))]
    argv += ["--data", *settings.data, "--reads", "base", "--max-steps", "3", "--json"]
    assert main(["train", *argv]) == 0
    assert main(["score", "--reward", settings.out, "--text", "the film was good", "--json"]) == 0
    guide = f"{settings.out}:praise=5"
    assert main(["generate", "--base", str(calm_toy), "--guide", guide, "--prompt", "the film", "--json"]) == 0
    capsys.readouterr()
