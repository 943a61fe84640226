"""Settings of small trainings, runs of them in two processes, and what they leave in their folders."""

import functools
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pandas
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from kills import fork, wait_for
from safetensors.torch import load_file

from radq.toy import make_reviews
from radq.training.config import RewardTrainingConfig, TrainingConfig

Config = TypeVar("Config", bound=TrainingConfig)

SMALL: dict[str, Any] = {"epochs": 1, "batch_size": 16, "learning_rate": 1e-3, "log_steps": 1}


def write_reviews(file: Path, number: int) -> Path:
    """Write a table of reviews with the label praise."""
    pandas.DataFrame(make_reviews(number), columns=["text", "praise"]).to_csv(file, index=False)
    return file


def make_settings(folder: Path, number: int, backbone: Path, **settings: Any) -> RewardTrainingConfig:
    """Settings of a run on so many reviews; the table and the run lie in the folder."""
    return RewardTrainingConfig(
        data=[str(write_reviews(folder / "reviews.csv", number))],
        backbone=str(backbone),
        cache=str(folder / "cache"),
        **{"out": str(folder / "run"), **settings},
    )


def changed(settings: Config, **changes: Any) -> Config:
    return type(settings)(**(vars(settings) | changes))


def run_in_two_processes(work: Callable[[], Any]) -> list[int]:
    """Do the work in two processes, as torchrun starts them, and return their exit codes.

    A number that the work returns is its exit code; work that returns something else ends with 0.
    """
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]

    def work_as(rank: int) -> int:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        places |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in places.items()}
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()  # it remembers the runs of earlier tests, which were of one process
        result = work()
        return result if isinstance(result, int) else 0

    processes = [fork(functools.partial(work_as, rank)) for rank in range(2)]
    return [wait_for(process) for process in processes]


def lines(run: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def losses(run: str | Path) -> list[float]:
    return [line["loss"] for line in lines(run) if "loss" in line]


def weights(run: str | Path) -> dict[str, torch.Tensor]:
    (file,) = Path(run).glob("*model.safetensors")  # of a LoRA run adapter_model.safetensors
    return load_file(file)
