"""The plan of a run in one line: its settings, whether chosen or given, and the time that it will take."""

import time
from typing import Any

import numpy as np
import torch

from radq.training.recipe import num_steps
from radq.training.trainer import BatchTrainer

TRIALS = 3  # the fastest counts: other programs may disturb one of them, and a step is captured in the second
MORE_THAN_STEPS = 1.1  # a run also updates weights, evaluates and saves


def describe_plan(trainer: BatchTrainer) -> str:
    """Say what is trained with which settings, and how long it will take on this machine."""
    config, model = trainer.settings, _parts(trainer).model
    rows, held_out = len(_parts(trainer).train_dataset), len(_parts(trainer).eval_dataset or ())
    steps = num_steps(config, rows)
    parts = [
        _describe_layers(model.config),
        f"texts of at most {config.max_length} tokens",
        f"{rows}{' pairs' * config.compares} to train on and {held_out or 'none'} held out",
        f"{config.epochs:g} passes in {steps} steps" if config.max_steps < 0 else f"{steps} steps",
        f"{config.batch_size} {'pairs' if config.compares else 'texts'} a step",
        f"learning rate {config.learning_rate:g}",
    ]
    if (feed := getattr(trainer, "feed", None)) is not None:
        _, p, k = feed.candidates.candidates.shape
        parts.append(f"{len(feed.candidates)} prefixes with {k} candidates at each of {p} places")
    seconds = estimate_seconds(trainer, steps)
    duration = "" if seconds is None else f"; about {format_duration(seconds)} on this machine"
    return f"recipe {config.recipe}: {', '.join(parts)}{duration}"


def _describe_layers(config: Any) -> str:
    depth = getattr(config, "backbone", config).num_hidden_layers
    if readout := getattr(config, "readout", None):
        return f"a readout of {len(readout['layers'])} of {depth} layers"
    rank = getattr(config, "lora_rank", 0)
    return f"{depth} layers" + (f" with LoRA of rank {rank}" if rank else "")


def estimate_seconds(trainer: BatchTrainer, steps: int) -> float | None:
    """Estimate the time of all steps from that of one batch of average size; None if there are several processes.

    The random numbers are put back, so that the estimate does not change the run.
    """
    if trainer.args.world_size > 1 or trainer.is_fsdp_enabled:
        return None
    plan = trainer.batches.plan()
    sizes = np.array([len(batch) * trainer.batches.lengths[batch].max() for batch in plan])  # with padding
    typical = int(np.abs(sizes - sizes.mean()).argmin())
    rows = plan[typical][: trainer.args.per_device_train_batch_size]
    batch = trainer.collate_for_training(_parts(trainer).train_dataset.batch(rows.tolist()))
    with torch.random.fork_rng():
        seconds = min(_time_step(trainer, batch) for _ in range(TRIALS))
    trainer.forget_captures()  # of a model that the Trainer has not prepared yet
    return seconds * len(plan[typical]) / len(rows) * sizes.mean() / sizes[typical] * steps * MORE_THAN_STEPS


def _time_step(trainer: BatchTrainer, batch: dict[str, torch.Tensor]) -> float:
    """Measure the seconds of a forward and a backward pass, whose gradients are thrown away."""
    model = _parts(trainer).model.to(trainer.args.device).train()
    began = time.perf_counter()
    items = trainer._get_num_items_in_batch([batch], trainer.args.device)
    trainer.add_gradients(model, batch, items).item()  # waits for a GPU
    model.zero_grad()
    return time.perf_counter() - began


def _parts(trainer: BatchTrainer) -> Any:
    """Return model and data of a trainer; transformers' types say that they may be missing."""
    return trainer


def format_duration(seconds: float) -> str:
    """Write a duration in words, such as "2 min 40 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{max(1, rest)} s"
