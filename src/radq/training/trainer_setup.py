"""Settings of transformers' Trainer: recipes for the settings of a run, its arguments made from them, and callbacks.

A recipe chooses the settings that a user leaves open. `auto` looks at the number of rows and tokens, the backbone, LoRA
or not, and CPU or GPU, but never at the speed of the machine, so that a command gives the same weights everywhere. Its
numbers come from a search over rates, steps, batches and layers on eight small tables (docs/training.md). `paper` takes
those of the paper.
"""

import contextlib
import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations

from radq.data.dataset import GlobalBatches
from radq.errors import DataError, OptionError, first_line
from radq.files import append_lines, atomic_file, read_lines
from radq.models.loading import find_device
from radq.training.config import TrainingConfig

Config = TypeVar("Config", bound=TrainingConfig)

SAME = (  # fields that have the name of an option of radq, and its value
    *("max_steps", "learning_rate", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_grad_norm", "gradient_checkpointing", "seed", "eval_steps", "save_steps", "report_to"),
)
MANAGED = {  # fields that `trainer:` must not set, with the option of radq that sets them
    "output_dir": "out",
    "num_train_epochs": "epochs",
    "logging_steps": "log_steps",
    "bf16": "precision",
    "fp16": "precision",
    "data_seed": "seed",
    "resume_from_checkpoint": "resume",
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), "micro_batch_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "auto_find_batch_size"), "micro_batch_size"),
    **{name: name for name in SAME},
}
FIXED = (  # fields that `trainer:` must not set, since radq relies on their values
    *("eval_strategy", "save_strategy", "logging_strategy", "logging_nan_inf_filter", "disable_tqdm"),
    *("save_total_limit", "save_only_model", "ignore_data_skip", "remove_unused_columns", "label_names"),
    *("label_smoothing_factor", "train_sampling_strategy", "dataloader_drop_last", "prediction_loss_only"),
    *("batch_eval_metrics", "eval_do_concat_batches", "include_for_metrics", "average_tokens_across_devices"),
)
STEPS_BETWEEN_CHECKPOINTS = 500  # of several processes, which do not save by the clock
NEVER = 2**31 - 1  # more steps than a run has
STOPPING = "\nstopping after this step with a checkpoint; Ctrl-C again stops at once without one\n"
# Fields that are set after TrainingArguments is made, which would refuse their combinations.
BEST = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")


def make_arguments(config: TrainingConfig, evaluates: bool, progress: bool) -> TrainingArguments:
    """Make the arguments of the Trainer, and refuse settings that it does not take."""
    _check_trainer(config.trainer)
    _check_report(config.report_to)
    device = training_device(config)
    precision = choose_precision(config.precision, device)
    arguments: dict[str, Any] = {name: getattr(config, name) for name in SAME} | {
        "output_dir": config.out,
        "num_train_epochs": config.epochs,
        "lr_scheduler_type": "linear",
        "optim": "adamw_torch_fused" if device in ("cuda", "cpu") else "adamw_torch",
        "bf16": precision == "bfloat16",
        "fp16": precision == "float16",
        "logging_steps": config.log_steps,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if evaluates else "no",
        "save_strategy": "steps",
        "save_steps": config.save_steps or NEVER,
        "disable_tqdm": not progress,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "ddp_find_unused_parameters": False,
        "use_cpu": device == "cpu",
    }
    given = copy.deepcopy(config.trainer)  # transformers adds its defaults to dictionaries
    arguments |= {name: value for name, value in given.items() if name not in BEST}
    try:
        made = TrainingArguments(**arguments)
    except Exception as error:  # its checks raise errors of many types
        reason = first_line(error)
        raise OptionError(
            f"transformers' Trainer refuses these settings: {reason}", "change the values under `trainer:` in the YAML."
        ) from error
    assert config.batch_size is not None
    micro = config.micro_batch_size or -(-config.batch_size // made.world_size)
    made.per_device_train_batch_size = made.per_device_eval_batch_size = micro
    made.gradient_accumulation_steps = -(-config.batch_size // (micro * made.world_size))
    if config.save_steps is None and made.world_size > 1:
        made.save_steps = STEPS_BETWEEN_CHECKPOINTS
    if config.chooses_best:  # TrainingArguments would ask for equal eval_steps and save_steps, which radq does not need
        made.load_best_model_at_end = True
        made.metric_for_best_model = config.best_metric
        rises = config.best_metric.startswith(("auc", "accuracy", "pair_accuracy", "spearman", "candidate_correlation"))
        made.greater_is_better = bool(config.trainer.get("greater_is_better", rises))
    return made


def training_device(config: TrainingConfig) -> str:
    """The device that a run trains on, known before its models are there."""
    return "cpu" if config.trainer.get("use_cpu") else find_device("auto")


def choose_precision(wanted: str, device: str) -> str:
    """Precision of the forward passes; auto is float32 on a CPU, and on a GPU the half precision that it supports."""
    if wanted == "auto":
        return "float32" if device == "cpu" else "bfloat16" if has_bfloat16(device) else "float16"
    if wanted == "float16" and device == "cpu":
        raise OptionError("precision float16 needs a GPU, and there is no GPU.", "use float32 or bfloat16.")
    return wanted


def training_precision(config: TrainingConfig) -> str:
    """The precision of the forward passes of a run."""
    return choose_precision(config.precision, training_device(config))


def in_precision(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Let forward passes compute in a precision that `choose_precision` has chosen."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))


def has_bfloat16(device: str) -> bool:
    """Whether an accelerator has bfloat16 instructions; emulated bfloat16 is slower than float32."""
    if device == "cuda":  # torch.cuda.is_bf16_supported says the same, after seconds of imports
        return torch.version.hip is not None or torch.cuda.get_device_capability() >= (8, 0)
    if device == "xpu":
        return torch.xpu.is_bf16_supported()
    return torch.backends.mps.is_macos_or_newer(14, 0)


def _check_trainer(given: dict[str, Any]) -> None:
    known = {option.name for option in fields(TrainingArguments)}
    for name in given:
        if name in MANAGED or name in FIXED:
            hint = f"use the option {MANAGED[name]}." if name in MANAGED else "leave it out."
            raise OptionError(f"trainer sets {name!r}, which radq sets itself.", hint)
        if name not in known:
            raise OptionError(
                f"trainer sets {name!r}, which is no field of transformers' TrainingArguments.", "check its name."
            )


def _check_report(name: str) -> None:
    available = get_available_reporting_integrations()
    if name not in ("none", "all", *available):
        raise OptionError(
            f"report_to must be one of {', '.join(['none', 'all', *available])}, got {name!r}.",
            "choose one of these, or install the package.",
        )


# --- recipes ---

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
    affordable = task.passes(max_length, num_layers)
    passes = config.epochs or float(np.clip(affordable, LEAST_PASSES[task.device], MOST_PASSES[task.device]))
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


# --- callbacks ---


def point_to_best(state: TrainerState, out: Path) -> None:
    """Set the folder of the best checkpoint: the Trainer remembers the folder in which it was saved before the move."""
    if state.best_global_step:
        state.best_model_checkpoint = str(out / f"checkpoint-{state.best_global_step}")


class RunCallback(TrainerCallback):
    """Takes log, evaluation and save steps from the settings, not from a checkpoint, and evaluates the last weights.

    The sampler of batches is told which epoch it is, and metrics.jsonl gets a line per log. A resumed run first drops
    the lines of steps that it repeats.
    """

    def __init__(self, config: TrainingConfig, batches: GlobalBatches):
        self.config, self.batches = config, batches
        self.file = Path(config.out) / "metrics.jsonl"

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)
        point_to_best(state, Path(self.config.out))
        if not state.is_world_process_zero:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        before: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError, DataError):  # a damaged line does not keep a run from going on
            for row in read_lines(self.file):
                if row["step"] <= state.global_step:
                    before.append(row)
        with atomic_file(self.file) as temporary, temporary.open("wb") as stream:
            append_lines(stream, before)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self.file.open("ab") as stream:
                append_lines(stream, [{"step": state.global_step, "epoch": state.epoch, **(logs or {})}])

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.batches.epoch = int((state.epoch or 0) + 1e-6)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.config.chooses_best and state.global_step >= state.max_steps:
            control.should_evaluate = True


class SavingCallback(TrainerCallback):
    """Asks for a checkpoint when some minutes have passed, and ends the run with one when it is to stop.

    It is for a single process: several would have to agree on the step.
    """

    def __init__(self, minutes: float):
        self.seconds = 60 * minutes
        self.saved = time.monotonic()
        self.stop = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.saved = time.monotonic()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.saved = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stop:
            control.should_save = control.should_training_stop = True
        elif time.monotonic() - self.saved >= self.seconds:
            control.should_save = True

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Let the first Ctrl-C (or SIGTERM) inside the block stop the run with a checkpoint, and the second at once."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, *_: Any) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        os.write(2, STOPPING.encode())  # print might be interrupted in the middle of a line by itself
