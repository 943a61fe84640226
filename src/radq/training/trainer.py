"""The trainer that all of radq's trainings share: steps, logs, checkpoints and the best evaluation.

The loss of an optimizer step is the loss of its whole batch, however that is cut: sums are divided by the utterances
and positions of all micro-batches of all processes. So padding, micro-batches and the number of processes change
nothing but the draws of a backbone's dropout, and a killed run resumes to the same weights.
"""

import json
import shutil
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
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

from radq.data.dataset import GlobalBatches, RewardData
from radq.errors import OptionError, TrainingError
from radq.files import explained_writing, whole_file
from radq.models.loading import quiet
from radq.training.arguments import make_arguments
from radq.training.checkpoints import STATE, find_checkpoints, seal
from radq.training.config import TrainingConfig

CHECKPOINTS_KEPT = 2  # and the best one, where the best is asked for
ROWS_NAMED = 8  # of a batch, in an error


class BatchTrainer(Trainer):
    """transformers' Trainer over whole batches: exact accumulation, checkpoints that are whole, metrics.jsonl.

    A subclass has `compute_loss`, and `prediction_step`, `metrics` and `metric_names` where it is evaluated.
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
            args=make_arguments(config, eval_dataset is not None, progress),
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
        self.add_callback(_RunCallback(config))
        if not progress:
            self.remove_callback(PrinterCallback)
        if self.is_world_process_zero():
            self.add_callback(_MetricsCallback(Path(config.out) / "metrics.jsonl"))
        if config.chooses_best and config.best_metric not in (names := ["loss", *self.metric_names()]):
            raise OptionError(f"metric is {config.best_metric!r}.", f"the evaluation has {', '.join(names)}.")

    def collate(self, batch: Any) -> Any:
        """The data set returns whole batches."""
        return batch

    @abstractmethod
    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Compute the metrics from what `prediction_step` has returned for all batches."""

    @abstractmethod
    def metric_names(self) -> list[str]:
        """The names of the metrics that `metrics` will return for the evaluation data."""

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
        counts = torch.stack([count_items(batch["loss_mask"]) for batch in batch_samples]).sum(0).to(device)
        return self.accelerator.reduce(counts, "sum") if self.args.world_size > 1 else counts

    def share(self, mask: Tensor, num_items_in_batch: Tensor | None) -> Float[Tensor, "2"]:
        """How much of the utterances and positions of the whole optimizer step is here."""
        here = count_items(mask)
        if num_items_in_batch is None:
            return here / here.clamp(min=1)
        return here / num_items_in_batch.clamp(min=1) * self.args.world_size  # processes are averaged later

    # --- log, checkpoints ---

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and start_time is not None:
            logs["tokens_per_second"] = round(self.tokens_seen * self.args.world_size / (time.time() - start_time))
        super().log(logs, start_time)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Stop at the first loss that is no number: what comes after it is lost."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        if not bool(loss.isfinite()):
            rows = [str(row + 1) for row in inputs["rows"].tolist()]
            named = ", ".join(rows[:ROWS_NAMED]) + (", …" if len(rows) > ROWS_NAMED else "")
            raise TrainingError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}, in a batch with the rows {named} "
                "(counted from 1 over all data, without those left out).",
                f"lower --learning-rate, or look at these rows; {self._kept()}.",
            )
        return loss

    def _check_weights(self) -> None:
        """Save no weights that are no numbers, as a step that is too long leaves them after a finite loss."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]  # pyright: ignore
        if trained and not bool(torch.stack([parameter.isfinite().all() for parameter in trained]).all()):
            raise TrainingError(
                f"the weights are not finite after step {self.state.global_step}.",
                f"lower --learning-rate; {self._kept()}.",
            )

    def _kept(self) -> str:
        kept = find_checkpoints(self.settings.out)
        return f"the last good checkpoint is {str(kept[-1])!r}" if kept else "there is no checkpoint yet"

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.settings.out) / ".saving")

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Beside, then in one move to its place: a checkpoint is whole or not there."""
        out, saving, name = (
            Path(self.settings.out),
            Path(self._get_output_dir(trial)),
            f"checkpoint-{self.state.global_step}",
        )
        self._check_weights()
        if self.is_world_process_zero():
            shutil.rmtree(saving, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            with explained_writing(out / name):
                super()._save_checkpoint(model, trial)
                point_to_best(self.state, out)
                self.accelerator.wait_for_everyone()
                if self.is_world_process_zero():
                    self.state.save_to_json(str(saving / name / STATE))
                    seal(saving / name)
                    shutil.rmtree(out / name, ignore_errors=True)
                    (saving / name).rename(out / name)
        finally:
            if self.is_world_process_zero():
                shutil.rmtree(saving, ignore_errors=True)
        if self.is_world_process_zero():
            for old in find_checkpoints(out)[:-CHECKPOINTS_KEPT]:
                if str(old) != self.state.best_model_checkpoint:
                    shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    # --- the best evaluation ---

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Save what is the best so far; stop where too many evaluations were no better."""
        better = super()._determine_best_metric(metrics, trial)
        if self.settings.chooses_best and better:
            self.control.should_save = True
        elif self.settings.early_stopping and self._evaluations_since_best() >= self.settings.early_stopping:
            self.control.should_training_stop = True
            self.control.should_save = False  # a run that is resumed takes these steps again, and stops here again
        return better

    def _evaluations_since_best(self) -> int:
        name, best = f"eval_{self.settings.best_metric}", self.state.best_global_step or 0
        return sum(name in line and line["step"] > best for line in self.state.log_history)

    def _load_best_model(self) -> None:
        with quiet():  # it would report the weights of a frozen backbone, which no checkpoint holds
            super()._load_best_model()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with quiet():  # it would report those, and tied weights, which are stored once
            super()._load_from_checkpoint(resume_from_checkpoint, model)


def point_to_best(state: TrainerState, out: Path) -> None:
    """Where the best checkpoint lies: the Trainer has seen it where it was saved before it was moved."""
    if state.best_global_step:
        state.best_model_checkpoint = str(out / f"checkpoint-{state.best_global_step}")


def count_items(mask: Tensor) -> Float[Tensor, "2"]:
    """Utterances and positions."""
    return torch.stack([mask.any(1).sum(), mask.sum()]).float()


class _EpochCallback(TrainerCallback):
    """Tells the batches which epoch it is."""

    def __init__(self, batches: GlobalBatches):
        self.batches = batches

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.batches.epoch = int((state.epoch or 0) + 1e-6)


class _RunCallback(TrainerCallback):
    """Lets a resumed run take its steps from its settings, not from the checkpoint, and evaluates the last weights."""

    def __init__(self, config: TrainingConfig):
        self.config = config

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.compute_steps(args, state.max_steps)
        point_to_best(state, Path(self.config.out))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.config.chooses_best and state.global_step >= state.max_steps:
            control.should_evaluate = True


class _MetricsCallback(TrainerCallback):
    """metrics.jsonl: a line per log. A resumed run drops the lines of steps it takes again."""

    def __init__(self, file: Path):
        self.file = file

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = self.file.read_text(errors="replace").splitlines() if self.file.exists() else []
        kept = [line for line in lines if _step(line) <= state.global_step]
        with whole_file(self.file) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in kept))

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


def _step(line: str) -> float:
    """The step that a line of metrics.jsonl belongs to; infinity for a line that a kill or a full disk has cut."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
