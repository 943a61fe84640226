"""What transformers' Trainer is told: its arguments, made from the settings of a run, and its callbacks."""

import contextlib
import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations

from radq.data.dataset import GlobalBatches
from radq.errors import DataError, OptionError, first_line
from radq.files import append_lines, atomic_file, read_lines
from radq.models.loading import find_device
from radq.training.config import TrainingConfig

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
        if name in MANAGED:
            raise OptionError(f"trainer sets {name!r}, which radq sets itself.", f"use the option {MANAGED[name]}.")
        if name in FIXED:
            raise OptionError(f"trainer sets {name!r}, which radq sets itself.", "leave it out.")
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


# --- callbacks ---


def point_to_best(state: TrainerState, out: Path) -> None:
    """Set the folder of the best checkpoint: the Trainer remembers the folder in which it was saved before the move."""
    if state.best_global_step:
        state.best_model_checkpoint = str(out / f"checkpoint-{state.best_global_step}")


class RunCallback(TrainerCallback):
    """Takes log, evaluation and save steps from the settings, not from a checkpoint, and evaluates the last weights.

    The sampler of batches is told which epoch it is.
    """

    def __init__(self, config: TrainingConfig, batches: GlobalBatches):
        self.config, self.batches = config, batches

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)
        point_to_best(state, Path(self.config.out))

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.batches.epoch = int((state.epoch or 0) + 1e-6)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.config.chooses_best and state.global_step >= state.max_steps:
            control.should_evaluate = True


class MetricsCallback(TrainerCallback):
    """Writes a line of metrics.jsonl per log. A resumed run first drops the lines of steps that it repeats."""

    def __init__(self, file: Path):
        self.file = file

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in self._read() if row["step"] <= state.global_step]
        with atomic_file(self.file) as temporary, temporary.open("wb") as stream:
            append_lines(stream, kept)

    def _read(self) -> Iterator[dict[str, Any]]:
        """Rows up to the first damaged line; metrics are a record, so damage does not keep a run from going on."""
        with contextlib.suppress(FileNotFoundError, DataError):
            yield from read_lines(self.file)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        with self.file.open("ab") as stream:
            append_lines(stream, [{"step": state.global_step, "epoch": state.epoch, **(logs or {})}])


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
