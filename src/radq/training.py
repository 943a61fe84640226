"""The trainer of reward models, and what all of radq's trainers share; on transformers' Trainer. `radq.runs` makes a
whole run of it.

The loss of an optimizer step is the loss of its whole batch, however that is cut: sums are divided by the utterances
and positions of all micro-batches of all processes. Random tokens of the regulariser depend on row, position and epoch.
So padding, micro-batches and the number of processes change nothing but the draws of a backbone's dropout, and a killed
run resumes to the same weights.
"""

import json
import shutil
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from radq.data import GlobalBatches, RewardData
from radq.losses import LOSSES, baseline_loss, distillation_loss, prefix_weights
from radq.models import RewardModel
from radq.settings import RewardTrainingConfig, TrainingConfig
from radq.statistics import area_under_curve

CHECKPOINTS_KEPT = 2


class BatchTrainer(Trainer):
    """transformers' Trainer over whole batches: exact accumulation, checkpoints that are whole, metrics.jsonl.

    A subclass has `compute_loss`, and `prediction_step` and `metrics` where it is evaluated.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainingConfig,
        train_dataset: RewardData,
        eval_dataset: RewardData | None = None,
        progress: bool = False,
    ):
        self.settings = config
        self.tokens_seen = 0
        super().__init__(
            model=model,
            args=_training_arguments(config, eval_dataset is not None, progress),
            data_collator=self.collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=self.metrics,
        )
        self.model_accepts_loss_kwargs = True  # the loss is divided by what the whole optimizer step holds,
        self.loss_is_scaled_for_ga = True  # so the Trainer must not divide it again
        self.batches = GlobalBatches(
            train_dataset.lengths,
            config.batch_size,
            self.args.gradient_accumulation_steps,
            self.args.process_index,
            self.args.world_size,
            config.seed,
        )
        self.add_callback(_EpochCallback(self.batches))
        if not progress:
            self.remove_callback(PrinterCallback)
        if self.is_world_process_zero():
            self.add_callback(_MetricsCallback(Path(config.out) / "metrics.jsonl"))

    def collate(self, batch: Any) -> Any:
        """The data set returns whole batches."""
        return batch

    @abstractmethod
    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """From what `prediction_step` returns of all batches."""

    def get_train_dataloader(self) -> DataLoader:
        # not prepared by accelerate, which would repeat rows to fill the last batch
        data: Any = self.train_dataset
        return DataLoader(
            data,
            batch_sampler=self.batches,
            collate_fn=self.collate,
            pin_memory=self.args.device.type == "cuda",
        )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Utterances and positions of the whole optimizer step, over all micro-batches and processes."""
        counts = torch.stack([_count(batch["loss_mask"]) for batch in batch_samples]).sum(0).to(device)
        return self.accelerator.reduce(counts, "sum") if self.args.world_size > 1 else counts

    def share(self, mask: Tensor, num_items_in_batch: Tensor | None) -> Float[Tensor, "2"]:
        """How much of the utterances and positions of the whole optimizer step is here."""
        here = _count(mask)
        if num_items_in_batch is None:
            return here / here.clamp(min=1)
        return here / num_items_in_batch.clamp(min=1) * self.args.world_size  # processes are averaged later

    # --- log, checkpoints ---

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and start_time is not None:
            logs["tokens_per_second"] = round(self.tokens_seen * self.args.world_size / (time.time() - start_time))
        super().log(logs, start_time)

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.settings.out) / ".saving")

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Beside, then in one move to its place: a checkpoint is whole or not there."""
        saving = Path(self._get_output_dir(trial))
        if self.is_world_process_zero():
            shutil.rmtree(saving, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            name = f"checkpoint-{self.state.global_step}"
            shutil.rmtree(Path(self.settings.out) / name, ignore_errors=True)
            (saving / name).rename(Path(self.settings.out) / name)
            shutil.rmtree(saving, ignore_errors=True)
            for old in find_checkpoints(self.settings.out)[:-CHECKPOINTS_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()


class RewardTrainer(BatchTrainer):
    """transformers' Trainer for reward models: their losses and metrics."""

    def __init__(
        self,
        model: RewardModel,
        config: RewardTrainingConfig,
        train_dataset: RewardData,
        eval_dataset: RewardData | None = None,
        teacher: RewardModel | None = None,
        progress: bool = False,
    ):
        self.config = config
        self.teacher = teacher  # outside the module: never trained, never saved
        super().__init__(model, config, train_dataset, eval_dataset, progress)
        if teacher is not None:
            teacher.requires_grad_(False).eval().to(self.args.device)  # pyright: ignore[reportArgumentType]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.config.head_learning_rate is not None:
            head: Any = self.model.head  # pyright: ignore[reportOptionalMemberAccess]
            give_own_rate(optimizer, list(head.parameters()), self.config.head_learning_rate)
        return optimizer

    # --- losses ---

    def compute_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        mask = inputs["loss_mask"]
        here = _count(mask)
        share = self.share(mask, num_items_in_batch)
        output = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **self._extra(inputs))
        if self.config.teacher:
            loss = distillation_loss(output.rewards, mask, self._targets(inputs)) * share[1]
        else:
            response_loss = LOSSES[self.config.loss](output.rewards, mask, inputs["responses"], inputs["weights"])
            loss = response_loss * len(mask) / here[0].clamp(min=1) * share[0]
        if output.marginals is not None:
            loss = loss + self.config.reg_weight * baseline_loss(output.marginals, mask) * share[1]
        self.tokens_seen += inputs["attention_mask"].numel()
        return (loss, output) if return_outputs else loss

    def _extra(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        model: Any = self.model
        if self.config.kind == "v" or self.config.reg_weight == 0 or not model.training:
            return {}
        epoch = int(self.state.epoch or 0)
        return {"random_tokens": random_tokens(inputs, model.vocabulary.size, self.config.seed, epoch)}

    def _targets(self, inputs: dict[str, Tensor]) -> Float[Tensor, "b t a"]:
        if "targets" in inputs:
            return inputs["targets"]
        assert self.teacher is not None
        with torch.no_grad(), self.accelerator.autocast():  # in the precision of the student's forward
            return self.teacher.token_rewards(inputs["input_ids"], inputs["attention_mask"]).float()

    # --- evaluation ---

    @torch.no_grad()
    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, and of each utterance: rewards at its last token, weighted squared errors, distance to the teacher."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss, output = self.compute_loss(model, inputs, return_outputs=True)
        reward_model: Any = self.model
        rewards = reward_model.link(output.rewards)
        mask, responses = inputs["loss_mask"], inputs["responses"]
        last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        last_rewards = rewards[torch.arange(len(last), device=last.device), last]
        columns = [last_rewards]
        if responses.shape[1]:
            errors = (rewards - responses[:, None]).square() * prefix_weights(mask)[..., None]
            columns.append(errors.sum(1))
        if self.config.teacher:
            distance = (rewards - self._targets(inputs)).square().mean(-1) * mask
            columns += [distance.sum(1, keepdim=True), mask.sum(1, keepdim=True).float()]
        return loss.detach(), torch.cat(columns, dim=1), responses

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        return compute_metrics(prediction.predictions, prediction.label_ids, self.model.config.attributes)  # pyright: ignore


def give_own_rate(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], rate: float) -> None:
    """Move parameters to groups of their own, which keep all other settings."""
    chosen = {id(parameter) for parameter in parameters}
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if moved:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
            optimizer.add_param_group({**group, "params": moved, "lr": rate})


def find_checkpoints(run: str | Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    found = [path for path in Path(run).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def random_tokens(inputs: dict[str, Tensor], vocab_size: int, seed: int, epoch: int) -> Int[Tensor, "b t"]:
    """One token per position, uniform, from a hash of row, position, epoch and seed: the same on every machine."""
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device)
    state = inputs["rows"][:, None] * 0x9E3779B1 + positions * 0x85EBCA77 + (epoch * 0x27D4EB2F + seed * 0x165667B1)
    for factor in (0x2C1B3C6D, 0x297A2D39):  # integer mixing in 32 bits, held in 64
        state = state & 0xFFFFFFFF
        state = ((state ^ (state >> 15)) * factor) & 0xFFFFFFFF
        state = state ^ (state >> 13)
    return state % vocab_size


def compute_metrics(stats: np.ndarray, responses: np.ndarray, attributes: list[str]) -> dict[str, float]:
    """From what `prediction_step` returns to means over the utterances; AUC and accuracy where labels are binary."""
    a = len(attributes)
    metrics: dict[str, float] = {}
    if responses.shape[1]:
        last, errors = stats[:, :a], stats[:, a : 2 * a]
        metrics["weighted_mse"] = float(errors.mean())
        metrics["last_token_mse"] = float(((last - responses) ** 2).mean())
        for column, attribute in enumerate(attributes):
            label = responses[:, column]
            if set(np.unique(label)) == {0.0, 1.0}:
                metrics[f"auc_{attribute}"] = area_under_curve(last[:, column], label)
                metrics[f"accuracy_{attribute}"] = float(((last[:, column] > 0.5) == (label > 0.5)).mean())
    rest = stats[:, a * (2 if responses.shape[1] else 1) :]
    if rest.shape[1]:
        metrics["distillation_mse"] = float(rest[:, 0].sum() / rest[:, 1].sum())
    return metrics


def _count(mask: Tensor) -> Float[Tensor, "2"]:
    """Utterances and positions."""
    return torch.stack([mask.any(1).sum(), mask.sum()]).float()


def _training_arguments(config: TrainingConfig, evaluates: bool, progress: bool) -> TrainingArguments:
    cuda = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "output_dir": config.out,
        "num_train_epochs": config.epochs,
        "max_steps": config.max_steps,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": config.warmup_steps,
        "optim": "adamw_torch_fused" if cuda else "adamw_torch",
        "weight_decay": config.weight_decay,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_epsilon": config.adam_epsilon,
        "max_grad_norm": config.max_grad_norm,
        "bf16": config.precision == "bfloat16" or (config.precision == "auto" and cuda),
        "gradient_checkpointing": config.gradient_checkpointing,
        "seed": config.seed,
        "logging_steps": config.log_steps,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps" if evaluates else "no",
        "eval_steps": config.eval_steps,
        "save_strategy": "steps",
        "save_steps": config.save_steps,
        "report_to": config.report_to,
        "disable_tqdm": not progress,
        "remove_unused_columns": False,
        "label_names": ["responses"],
        "ddp_find_unused_parameters": False,
        "use_cpu": not cuda,
    }
    arguments |= config.trainer
    settings = TrainingArguments(**arguments)
    micro = config.micro_batch_size or -(-config.batch_size // settings.world_size)
    settings.per_device_train_batch_size = micro
    settings.per_device_eval_batch_size = micro
    settings.gradient_accumulation_steps = -(-config.batch_size // (micro * settings.world_size))
    return settings


class _EpochCallback(TrainerCallback):
    """Tells the batches which epoch it is."""

    def __init__(self, batches: GlobalBatches):
        self.batches = batches

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.batches.epoch = int((state.epoch or 0) + 1e-6)


class _MetricsCallback(TrainerCallback):
    """metrics.jsonl: a line per log. A resumed run drops the lines of steps it takes again."""

    def __init__(self, file: Path):
        self.file = file

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= state.global_step]
        self.file.write_text("".join(f"{line}\n" for line in kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        with self.file.open("a") as stream:
            stream.write(json.dumps({"step": state.global_step, "epoch": state.epoch, **(logs or {})}) + "\n")
