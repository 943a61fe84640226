"""Recipes: where the settings come from that a user leaves open.

`auto` chooses them from the number of rows and tokens, the backbone, LoRA or not, and CPU or GPU. It never looks at the
speed of the machine, so that a command gives the same weights everywhere. The numbers below come from a search over
rates, steps, batches and layers on eight small tables (docs/training.md). `paper` takes those of the paper.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from radq.training.config import TrainingConfig

Config = TypeVar("Config", bound=TrainingConfig)

PAPER: dict[str, Any] = {
    "max_length": 512,
    "eval_share": 0.0,
    "epochs": 5.0,
    "batch_size": 100,
    "learning_rate": 1e-5,
    "warmup_steps": 0,
    "save_steps": 500,
}
LONGEST = 512  # tokens of a text that are tokenised, unless the user asks for another number
HELD_OUT_SHARE, HELD_OUT_MOST, HELD_OUT_LEAST_ROWS = 0.1, 1000, 20

WORK = {"cpu": 2e13, "gpu": 2e16}  # operations of a run: some minutes on two cores, or on a GPU
TRAINED_SHARE = 0.4  # of this work, and of the least steps: enough for the copy of a teacher, or for a second stage
LEAST_PASSES = {"cpu": 0.0, "gpu": 1.0}
MOST_PASSES = {"cpu": 6.0, "gpu": 3.0}
LEAST_STEPS, MOST_PASSES_FOR_STEPS = 150, 20.0  # a small table is read more often, until there are enough steps
BATCH_SIZE = {"cpu": 16, "gpu": 32}
SMALL_BATCH, FEW_STEPS, SHORT = 8, 200, 48  # few steps of short texts on average learn more in smaller batches
CPU_LENGTHS = (128, 64)
CPU_LAYERS = (12, 8, 6, 4)
CPU_LAYERS_LONG = 6  # texts are cut shorter rather than the backbone below this number of layers
WANTED_PASSES = 1.4  # on a CPU, so many passes over the data are worth more than deeper layers
RATE, RATE_WIDTH, RATE_LAYERS, HIGHEST_RATE = 2e-4, 576, 12, 1e-3  # of a whole backbone of this width and depth
LORA_RATE, HIGHEST_LORA_RATE, LORA_HEAD_SHARE = 1e-3, 5e-3, 0.1
READOUT_RATE = 1e-3
WARMUP_SHARE = 0.1


@dataclass(frozen=True)
class Task:
    """A task holds what the choice depends on: the data, the model and the device."""

    lengths: np.ndarray  # (n,): tokens of each row
    width: int  # of the hidden states
    num_layers: int  # of the backbone
    device: str  # cpu or gpu
    lora: bool = False
    readout: bool = False  # of a backbone that is read whole, and not trained
    may_cut_layers: bool = True  # not those of a trained model
    may_cut_texts: bool = True  # not where a prompt stands before each text
    texts_per_row: int = 1  # two for pairs

    def tokens(self, max_length: int) -> int:
        """Number of tokens of one pass over the data."""
        return int(np.minimum(self.lengths, max_length).sum())

    def passes(self, max_length: int, num_layers: int) -> float:
        """Number of passes over the data that the work of a run allows."""
        operations = 2 if self.readout else 6  # for each weight: 2 forward, and 4 back
        work_per_token = operations * 12 * self.width**2 * num_layers  # 12 d² weights in a layer
        work = WORK[self.device] * (1 if self.may_cut_layers else TRAINED_SHARE)
        return work / (work_per_token * max(1, self.tokens(max_length) * self.texts_per_row))


def held_out_share(config: TrainingConfig, num_rows: int) -> float:
    """Share of the rows that is kept for evaluation."""
    if config.eval_share is not None:
        return config.eval_share
    if config.recipe == "paper" or config.eval_data or num_rows < HELD_OUT_LEAST_ROWS:
        return 0.0
    return min(HELD_OUT_SHARE, HELD_OUT_MOST / num_rows)


def complete(config: Config, task: Task) -> Config:
    """The settings with a value for each that was left open; `task` holds the rows that are trained on."""
    if config.recipe == "paper":
        return _fill(config, **PAPER)
    max_length = config.max_length or _choose_length(task)
    num_layers = min(config.num_layers or _choose_layers(task, max_length), task.num_layers)
    config = _fill(config, max_length=max_length)
    if task.may_cut_layers and not task.readout:
        config = _fill(config, num_layers=num_layers)
    passes = config.epochs or _choose_passes(task, max_length, num_layers)
    batch_size = config.batch_size or _choose_batch(task, max_length, passes)
    if config.epochs is None and config.max_steps < 0:  # passes over a small table until there are enough steps
        least = LEAST_STEPS * (1 if task.may_cut_layers else TRAINED_SHARE)
        passes = max(passes, min(MOST_PASSES_FOR_STEPS, least * batch_size / len(task.lengths)))
    rate = config.learning_rate
    rate = float(f"{_choose_rate(task, num_layers):.2g}") if rate is None else rate
    config = _fill(config, epochs=float(f"{passes:.2g}"), batch_size=batch_size, learning_rate=rate)
    if task.lora:
        config = _fill(config, head_learning_rate=rate * LORA_HEAD_SHARE)
    return _fill(config, warmup_steps=round(WARMUP_SHARE * num_steps(config, len(task.lengths))))


def num_steps(config: TrainingConfig, num_rows: int) -> int:
    """Number of optimizer steps of a run whose settings are complete."""
    if config.max_steps > 0:
        return config.max_steps
    assert config.epochs is not None
    assert config.batch_size is not None
    return int(np.ceil(config.epochs * -(-num_rows // config.batch_size)))


def _fill(config: Config, **values: Any) -> Config:
    """Set the settings that are still open."""
    return replace(config, **{name: value for name, value in values.items() if getattr(config, name, 0) is None})


def _choose_length(task: Task) -> int:
    if task.device == "gpu" or not task.may_cut_texts:
        return LONGEST
    longer, shorter = CPU_LENGTHS
    return longer if task.passes(longer, CPU_LAYERS_LONG) >= WANTED_PASSES else shorter


def _choose_layers(task: Task, max_length: int) -> int:
    if task.device == "gpu" or not task.may_cut_layers or task.readout:
        return task.num_layers
    enough = (number for number in CPU_LAYERS if task.passes(max_length, number) >= WANTED_PASSES)
    return next(enough, CPU_LAYERS[-1])


def _choose_passes(task: Task, max_length: int, num_layers: int) -> float:
    return float(np.clip(task.passes(max_length, num_layers), LEAST_PASSES[task.device], MOST_PASSES[task.device]))


def _choose_batch(task: Task, max_length: int, passes: float) -> int:
    batch_size = BATCH_SIZE[task.device]
    few = passes * len(task.lengths) / batch_size < FEW_STEPS
    short = task.tokens(max_length) < SHORT * len(task.lengths)
    return SMALL_BATCH if task.device == "cpu" and few and short else batch_size


def _choose_rate(task: Task, num_layers: int) -> float:
    """Wider and deeper backbones need smaller rates."""
    narrower = RATE_WIDTH / task.width
    if task.readout:
        return min(HIGHEST_RATE, READOUT_RATE * narrower)
    if task.lora:
        return min(HIGHEST_LORA_RATE, LORA_RATE * narrower)
    return min(HIGHEST_RATE, RATE * narrower * min(1.0, (RATE_LAYERS / num_layers) ** 0.5))
