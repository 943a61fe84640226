"""Settings of small trainings, and what they leave in their folders."""

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from radq.training.config import TrainingConfig

Config = TypeVar("Config", bound=TrainingConfig)

SMALL: dict[str, Any] = {"epochs": 1, "batch_size": 16, "learning_rate": 1e-3, "log_steps": 1}


def changed(settings: Config, **changes: Any) -> Config:
    return type(settings)(**(vars(settings) | changes))


def losses(run: str | Path) -> list[float]:
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def weights(run: str | Path) -> dict[str, torch.Tensor]:
    (file,) = Path(run).glob("*model.safetensors")  # of a LoRA run adapter_model.safetensors
    return load_file(file)
