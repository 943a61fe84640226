"""Training of readouts: only they and the head learn, and the base model stays as it is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import changed, losses, weights

from radq import load
from radq.cli import main
from radq.errors import ModelError, OptionError
from radq.judges.models import load_judge
from radq.models.kinds import RadQ, RadV
from radq.models.reward import RewardModel
from radq.toy import NOUNS, VERBS
from radq.training.config import RewardTrainingConfig
from radq.training.outcome import next_commands
from radq.training.reward import train
from radq.training.run_folder import find_checkpoints


@pytest.fixture
def settings(settings: RewardTrainingConfig) -> RewardTrainingConfig:
    return changed(settings, reads="base", readout_layers=2, readout_width=24, learning_rate=3e-3, eval_share=0.2)


def clear_settings(kind: str, settings: RewardTrainingConfig, folder: Path) -> RewardTrainingConfig:
    """Settings of a readout; the last word of each text decides its label."""
    subjects = [f"{article} {noun} {verb}" for article in ("the", "this") for noun in NOUNS for verb in VERBS]
    texts = [f"{subject} {word},{label}\n" for subject in subjects for word, label in (("great", 1), ("awful", 0))]
    (folder / "clear.csv").write_text("".join(["text,praise\n", *texts]))
    data = [str(folder / "clear.csv")]
    return changed(settings, kind=kind, data=data, out=str(folder / kind), epochs=30, readout_width=96)


@pytest.mark.parametrize("kind", ["q", "v"])
def test_a_readout_learns_and_its_base_model_does_not(
    kind: str, settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    settings = changed(clear_settings(kind, settings, tmp_path), epochs=10, learning_rate=1e-2, reg_weight=0.1)
    metrics = train(settings)
    found = losses(settings.out)
    assert np.mean(found[-10:]) < 0.7 * np.mean(found[:10])
    assert metrics["eval_auc_praise"] > 0.95  # of texts that are held out; a constant has 0.5
    assert metrics["eval_last_token_mse"] < 0.1  # and 0.25
    saved = weights(settings.out)
    assert {name.split(".")[0] for name in saved} == {"readout", "head"}
    model = RewardModel.from_pretrained(settings.out)
    assert (model.config.kind, model.readout is not None) == (kind, True)
    before = RadQ.from_base(calm_toy, ["praise"])
    for name, weight in before.backbone.state_dict().items():
        assert torch.equal(model.backbone.state_dict()[name], weight)


def test_a_readout_learns_values_of_texts(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    found = train(clear_settings("v", settings, tmp_path))
    assert found["eval_auc_praise"] > 0.95
    assert found["eval_last_token_mse"] < 0.1
    model = RewardModel.from_pretrained(tmp_path / "v")
    assert model.tokenizer is not None
    good, bad = (torch.tensor([model.tokenizer(f"the film was {word}").input_ids]) for word in ("great", "awful"))
    assert model.token_rewards(good)[0, -1] > model.token_rewards(bad)[0, -1] + 0.5
    torch.testing.assert_close(model.token_rewards(good)[:, :-1], model.token_rewards(bad)[:, :-1])  # the same prefix


@pytest.mark.parametrize("kind", ["q", "v"])
def test_a_run_goes_on_from_its_checkpoint(kind: str, settings: RewardTrainingConfig, tmp_path: Path) -> None:
    settings = changed(settings, kind=kind)
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
def test_a_readout_of_values_teaches_one_that_steers(
    settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    """Both read the same base model, whose candidates the first one reads."""
    value = clear_settings("v", settings, tmp_path)
    train(value)
    student: dict[str, Any] = {"teacher": value.out, "base": str(calm_toy), "num_prefixes": 128, "epochs": 12}
    student |= {"learning_rate": 1e-2, "prompt_tokens": 2, "prefix_tokens": 8, "candidates": 10, "reg_weight": 0.1}
    found = train(changed(value, kind="q", out=settings.out, **student))
    assert found["eval_distillation_mse"] < 0.5 * found["eval_constant_distillation_mse"]
    assert found["eval_candidate_correlation"] > 0.5


def test_a_student_does_not_begin_as_a_readout_of_values(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    value = changed(settings, kind="v", out=str(tmp_path / "v"), max_steps=1)
    train(value)
    plain: dict[str, Any] = {"reads": "itself", "readout_layers": None, "readout_width": None, "backbone": ""}
    with pytest.raises(OptionError, match="the teacher is a readout") as caught:
        train(changed(settings, teacher=value.out, **plain))
    assert f"--backbone {settings.backbone} --reads base" in str(caught.value.hint)
    assert not Path(settings.out).exists()


def test_a_second_stage_goes_on_from_a_readout_of_values(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    value = changed(settings, kind="v", out=str(tmp_path / "v"), max_steps=4)
    train(value)
    plain: dict[str, Any] = {"reads": "itself", "readout_layers": None, "readout_width": None, "backbone": ""}
    second = changed(value, init=value.out, out=str(tmp_path / "second"), **plain)
    train(second)
    one, other = weights(value.out), weights(second.out)
    assert one.keys() == other.keys()
    assert not torch.equal(one["readout.inner.weight"], other["readout.inner.weight"])
    assert torch.equal(one["readout.sketch"], other["readout.sketch"])
    for run in (value, second):
        *_, distill = next_commands(run, ["praise"])
        assert f"--backbone {settings.backbone} --reads base --out {run.out}-q" in distill


def test_candidates_of_another_base_model_are_refused(
    settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    """A student that reads the states of one base model would never see those of the base model that it steers."""
    lm, tokenizer = load(calm_toy)
    for weight in lm.parameters():
        weight.data *= 1.005
    lm.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    RadV.from_backbone(calm_toy, ["praise"]).save_pretrained(tmp_path / "v")
    with pytest.raises(ModelError, match=r"and '.*other' has other weights"):
        train(changed(settings, teacher=str(tmp_path / "v"), base=str(tmp_path / "other"), num_prefixes=16))


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


@pytest.mark.parametrize("kind", ["q", "v"])
def test_the_command_trains_scores_judges_and_steers(
    kind: str, settings: RewardTrainingConfig, calm_toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [part for name in ("labels", "backbone", "out", "cache") for part in (f"--{name}", getattr(settings, name))]
    argv += ["--data", *settings.data, "--kind", kind, "--reads", "base", "--max-steps", "3", "--json"]
    assert main(["train", *argv]) == 0
    assert main(["score", "--reward", settings.out, "the film was good", "--json"]) == 0
    scores = load_judge(f"reward:{settings.out}").score(["the film was good", "a dull plot"])
    assert scores.shape == (2,)
    guide = f"{settings.out}:praise=5"
    assert main(["generate", "--base", str(calm_toy), "--guide", guide, "--prompt", "the film", "--json"]) == 0
    capsys.readouterr()
