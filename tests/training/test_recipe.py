"""Settings that are left open: chosen by counts alone, and learning at the first try."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_runs import make_settings

from radq.settings import check_values, read_yaml
from radq.toy import make_reviews
from radq.training.config import RewardTrainingConfig
from radq.training.reward import train
from radq.training.trainer_setup import (
    CPU_LAYERS,
    HIGHEST_LORA_RATE,
    LEAST_STEPS,
    LORA_HEAD_SHARE,
    PAPER,
    WORK,
    Task,
    complete,
    held_out_share,
    num_steps,
)

SMOLLM = {"width": 576, "num_layers": 30}

tasks = st.builds(
    Task,
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=300).map(np.array),
    width=st.sampled_from([16, 576, 768, 4096]),
    num_layers=st.integers(1, 40),
    device=st.sampled_from(["cpu", "gpu"]),
    lora=st.booleans(),
    may_cut_layers=st.booleans(),
    may_cut_texts=st.booleans(),
)


@given(tasks)
def test_complete_settings_are_allowed_and_stay(task: Task) -> None:
    settings = complete(RewardTrainingConfig(), task)
    check_values(settings)
    left = {option.name for option in fields(settings) if getattr(settings, option.name) is None}
    assert not left & (PAPER.keys() - {"eval_share", "save_steps"})
    assert (settings.num_layers is None) == (not task.may_cut_layers)
    assert 1 <= (settings.num_layers or 1) <= task.num_layers
    assert settings.warmup_steps is not None
    assert settings.warmup_steps <= num_steps(settings, len(task.lengths))
    assert complete(settings, task) == settings


@given(tasks, st.sampled_from(["auto", "paper"]))
def test_given_settings_are_kept(task: Task, recipe: str) -> None:
    given_values = {"max_length": 7, "epochs": 3.0, "batch_size": 5, "learning_rate": 0.0, "warmup_steps": 2}
    settings = RewardTrainingConfig(recipe=recipe, num_layers=1, **given_values)  # pyright: ignore
    settings = complete(settings, task)
    assert {name: getattr(settings, name) for name in given_values} == given_values
    assert settings.num_layers == 1


@given(tasks)
def test_the_paper_does_not_look_at_the_task(task: Task) -> None:
    settings = complete(RewardTrainingConfig(recipe="paper"), task)
    assert {name: getattr(settings, name) for name in PAPER} == PAPER
    assert settings.num_layers is None


@given(st.integers(20, 5000), st.integers(4, 400))
def test_the_work_of_a_cpu_is_limited_unless_steps_are_few(rows: int, length: int) -> None:
    task = Task(np.full(rows, length), device="cpu", **SMOLLM)
    settings = complete(RewardTrainingConfig(), task)
    assert settings.num_layers in CPU_LAYERS
    assert settings.epochs is not None
    work = settings.epochs / task.passes(settings.max_length or 0, settings.num_layers or 0) * WORK["cpu"]
    steps = num_steps(settings, rows)
    assert work <= 1.1 * WORK["cpu"] or steps <= 1.25 * LEAST_STEPS  # epochs are rounded, and so are steps
    assert steps >= min(LEAST_STEPS, 20 * rows / (settings.batch_size or 1)) * 0.94


def test_more_data_means_fewer_layers_and_shorter_texts() -> None:
    chosen = [
        complete(RewardTrainingConfig(), Task(np.full(rows, 100), device="cpu", **SMOLLM))
        for rows in (100, 500, 1000, 5000)
    ]
    layers = [settings.num_layers or 0 for settings in chosen]
    assert layers == sorted(layers, reverse=True)
    assert layers[0] == 12
    assert layers[-1] == 4
    assert (chosen[0].max_length, chosen[-1].max_length) == (128, 64)


def test_wider_and_deeper_backbones_have_smaller_rates() -> None:
    def rate(width: int, num_layers: int, lora: bool) -> float:
        task = Task(np.full(1000, 20), width, num_layers, "gpu", lora)
        return complete(RewardTrainingConfig(), task).learning_rate or 0.0

    assert rate(576, 12, lora=False) == 2e-4
    assert rate(576, 30, lora=False) < 2e-4
    assert 1e-5 < rate(4096, 32, lora=False) < 2e-5
    assert rate(576, 12, lora=True) == 1e-3


def test_a_share_is_held_out() -> None:
    assert held_out_share(RewardTrainingConfig(), 19) == 0
    assert held_out_share(RewardTrainingConfig(), 500) == 0.1
    assert held_out_share(RewardTrainingConfig(), 100_000) == 0.01
    assert held_out_share(RewardTrainingConfig(eval_data=["other.csv"]), 500) == 0
    assert held_out_share(RewardTrainingConfig(eval_share=0.0), 500) == 0
    assert held_out_share(RewardTrainingConfig(recipe="paper"), 500) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q", "v"])
def test_the_defaults_learn(kind: str, calm_toy: Path, tmp_path: Path) -> None:
    rows = [(text, float(label > 0.5)) for text, label in make_reviews(600) if label != 0.5]
    pandas.DataFrame(rows, columns=["text", "praise"]).to_csv(tmp_path / "reviews.csv", index=False)
    settings = RewardTrainingConfig(
        data=[str(tmp_path / "reviews.csv")],
        labels="praise",
        backbone=str(calm_toy),
        out=str(tmp_path / "run"),
        cache=str(tmp_path / "cache"),
        kind=kind,  # pyright: ignore[reportArgumentType]
    )
    assert train(settings)["eval_auc_praise"] > 0.9
    stored = read_yaml(tmp_path / "run" / "config.yaml", RewardTrainingConfig)
    assert stored.learning_rate == 1e-3  # the highest one, for a narrow backbone
    resumed = train(replace(settings), resume=True)  # open settings are those of the run
    assert resumed["eval_auc_praise"] > 0.9
    assert read_yaml(tmp_path / "run" / "config.yaml", RewardTrainingConfig) == stored


@pytest.mark.slow
def test_adapters_that_are_trained_further_have_their_rate(calm_toy: Path, tmp_path: Path) -> None:
    first = make_settings(
        tmp_path, 60, calm_toy, labels="praise", out=str(tmp_path / "first"), lora_rank=2, max_steps=2
    )
    train(first)
    train(replace(first, backbone="", lora_rank=None, init=first.out, out=str(tmp_path / "second")))
    rates = [read_yaml(tmp_path / name / "config.yaml", RewardTrainingConfig) for name in ("first", "second")]
    assert [stored.learning_rate for stored in rates] == [HIGHEST_LORA_RATE] * 2
    assert [stored.head_learning_rate for stored in rates] == [HIGHEST_LORA_RATE * LORA_HEAD_SHARE] * 2
