"""FSDP2 in two processes on CPUs: the losses and rewards are those of one process, and the model is saved whole.

accelerate uses FSDP on accelerators only, so each process first tells accelerate's state that it may. All else is what
runs on GPUs: torch splits the weights, and transformers' Trainer trains, saves and loads them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from training_runs import SMALL, changed, losses, make_settings, run_in_two_processes, weights

from radq.models.reward import RewardModel
from radq.training.config import RewardTrainingConfig
from radq.training.reward import train
from radq.training.run_folder import find_checkpoints

pytestmark = pytest.mark.slow

FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}


@pytest.fixture
def settings(calm_toy: Path, tmp_path: Path) -> RewardTrainingConfig:
    return make_settings(tmp_path, 96, calm_toy, labels="praise", **SMALL)


def allow_cpus() -> None:
    """Let accelerate take the FSDP plugin also where the processes compute on CPUs."""
    begin = AcceleratorState.__init__
    plugins: list[Any] = []

    def begin_with_fsdp(state: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        begin(state, *args, fsdp_plugin=fsdp_plugin, **options)
        plugins.extend([fsdp_plugin] if fsdp_plugin is not None else [])
        if plugins:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugins[0]

    AcceleratorState.__init__ = begin_with_fsdp


def train_sharded(settings: RewardTrainingConfig, resume: bool = False) -> list[int]:
    def work() -> None:
        allow_cpus()
        train(changed(settings, trainer=FSDP), resume=resume)

    return run_in_two_processes(work)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    "kind", [{}, {"head": "mlp"}, {"kind": "v"}, {"lora_rank": 2}, {"reads": "base"}], ids=lambda kind: str(kind)
)
def test_sharded_training_has_the_losses_and_rewards_of_one_process(
    kind: dict[str, Any], settings: RewardTrainingConfig, tmp_path: Path
) -> None:
    settings = changed(settings, **kind)
    train(settings)
    sharded = changed(settings, out=str(tmp_path / "sharded"))
    assert train_sharded(sharded) == [0, 0]
    assert losses(sharded.out) == pytest.approx(losses(settings.out), abs=1e-5)
    models = [RewardModel.from_pretrained(run.out) for run in (settings, sharded)]
    text = torch.randint(3, 30, (2, 12))
    torch.testing.assert_close(*(model.token_rewards(text) for model in models), atol=1e-3, rtol=1e-3)
    assert weights(settings.out).keys() == weights(sharded.out).keys()
    assert type(models[0]) is type(models[1])
    assert not list(Path(sharded.out).glob("*.bin"))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("rank", [0, 2])
def test_a_sharded_run_resumes(rank: int, settings: RewardTrainingConfig, tmp_path: Path) -> None:
    whole = changed(settings, out=str(tmp_path / "whole"), save_steps=3, lora_rank=rank)
    assert train_sharded(whole) == [0, 0]
    first, last = find_checkpoints(whole.out)
    assert first.name == "checkpoint-3"
    expected = weights(whole.out)
    for file in (*Path(whole.out).glob("*model.safetensors"), *last.iterdir()):
        file.unlink()
    last.rmdir()
    assert train_sharded(whole, resume=True) == [0, 0]
    for name, values in weights(whole.out).items():
        torch.testing.assert_close(values, expected[name])
