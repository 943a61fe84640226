"""Arguments of transformers' Trainer, made from the settings of a run: device, precision, batches and steps."""

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations

from radq.errors import OptionError, first_line
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
    _set_batches(made, config)
    if config.save_steps is None and made.world_size > 1:
        made.save_steps = STEPS_BETWEEN_CHECKPOINTS
    if config.chooses_best:  # TrainingArguments would ask for equal eval_steps and save_steps, which radq does not need
        made.load_best_model_at_end = True
        made.metric_for_best_model = config.best_metric
        rises = config.best_metric.startswith(("auc", "accuracy", "pair_accuracy", "spearman", "candidate_correlation"))
        made.greater_is_better = bool(config.trainer.get("greater_is_better", rises))
    return made


def _set_batches(made: TrainingArguments, config: TrainingConfig) -> None:
    assert config.batch_size is not None
    micro = config.micro_batch_size or -(-config.batch_size // made.world_size)
    made.per_device_train_batch_size = micro
    made.per_device_eval_batch_size = micro
    made.gradient_accumulation_steps = -(-config.batch_size // (micro * made.world_size))


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
