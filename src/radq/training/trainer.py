"""Base of radq's trainers: optimizer steps, logs, checkpoints and the choice of the best evaluation.

The loss of an optimizer step is the loss of its whole batch: sums are divided by the number of texts or positions in
all micro-batches of all processes. So padding, micro-batches and the number of processes change only the random numbers
of a backbone's dropout, and a run that was killed and resumed ends with the same weights.
"""

import contextlib
import shutil
import time
import traceback
from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import EvalPrediction, PreTrainedModel, PrinterCallback, Trainer

from radq.data.dataset import GlobalBatches, RewardData, pad_batch
from radq.errors import MemoryLimitError, OptionError, RadqError, StoppedError, TrainingError, fills_memory, first_line
from radq.files import explained_writing
from radq.models.kv_cache import known_positions
from radq.numerics import empty_cache, without_emulation_notice
from radq.sources.hub import quiet
from radq.training.capture import CapturedSteps, can_capture
from radq.training.config import TrainingConfig
from radq.training.losses import count_items
from radq.training.run_folder import STATE, find_checkpoints, write_checksums
from radq.training.trainer_setup import RunCallback, SavingCallback, make_arguments, point_to_best

CHECKPOINTS_KEPT = 2  # beside the best one, if the settings ask for the best
STEPS_UNCHECKED = 100  # losses are read at the latest after so many micro-batches
ROWS_NAMED = 8  # the most rows of a batch that an error names
LENGTH_STEP = 8  # batches whose steps are captured are padded to multiples of this, so that few shapes occur


class StepLoss(NamedTuple):
    """The loss of one micro-batch, kept on its device until it is checked."""

    step: int
    loss: Tensor
    rows: Tensor


class BatchTrainer(Trainer):
    """transformers' Trainer over batches of texts of similar length.

    Losses do not depend on micro-batches, checkpoints are complete or not there, and logs go to metrics.jsonl. A
    subclass defines `find_loss`, `read_output`, `metrics` and `metric_names`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainingConfig,
        train_dataset: RewardData,
        eval_dataset: RewardData | None = None,
        progress: bool = False,
    ):
        assert config.batch_size is not None
        self.settings = config
        self.run_folder = config.out  # with which a run goes on
        self.tokens_seen = 0
        self.unchecked: list[StepLoss] = []
        super().__init__(
            model=model,
            args=make_arguments(config, eval_dataset is not None, progress),
            data_collator=self.collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=self.metrics,
        )
        # The loss is divided by the texts of the whole optimizer step already; the Trainer must not divide it again.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self.batches = GlobalBatches(
            train_dataset.lengths,
            config.batch_size,
            self.args.gradient_accumulation_steps,
            self.args.process_index,
            self.args.world_size,
            config.seed,
        )
        self.captured: CapturedSteps | None = None
        self.captures = config.capture_steps and can_capture(self.args)
        self.add_callback(RunCallback(config, self.batches))
        self.saving = SavingCallback(config.save_minutes)
        if self.args.world_size == 1:
            self.add_callback(self.saving)
        if not progress:
            self.remove_callback(PrinterCallback)
        if config.chooses_best and config.best_metric not in (names := ["loss", *self.metric_names()]):
            raise OptionError(
                f"metric must be one of {', '.join(names)}, got {config.best_metric!r}.", "choose one of these."
            )

    def train_and_evaluate(self, checkpoint: Path | None) -> dict[str, float]:
        """Train, from a checkpoint if one is given, evaluate the weights at the end, and return the metrics of both."""
        with without_emulation_notice():
            try:
                with self.saving.stopped_by_signals() if self.args.world_size == 1 else contextlib.nullcontext():
                    result = self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
                if self.saving.stop and self.state.global_step < self.state.max_steps:
                    raise StoppedError(
                        f"stopped after step {self.state.global_step} of {self.state.max_steps}; "
                        f"{self._last_checkpoint()}.",
                        f"go on with --resume --out {self.run_folder}.",
                    )
                self.forget_captures()
                self._check_losses()
                metrics = dict(result.metrics) | self._evaluate_end()
            except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
                if isinstance(error, RadqError) or not self.settings.trainer:
                    raise
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise OptionError(
                    f"transformers' Trainer failed with the settings {self.settings.trainer}: {reason}",
                    "change or remove them under `trainer:`.",
                ) from error
        if self.settings.chooses_best and self.state.best_global_step:
            metrics["best_step"] = self.state.best_global_step
        return metrics

    def _evaluate_end(self) -> dict[str, float]:
        """Metrics of the weights at the end, from the log if an evaluation in the run was about these weights."""
        if self.eval_dataset is None:
            return {}
        chosen = self.state.best_global_step if self.settings.chooses_best else None
        for line in reversed(self.state.log_history):
            if "eval_loss" in line and line["step"] == (chosen or self.state.global_step):
                return {name: value for name, value in line.items() if name.startswith("eval_")}
        return self.evaluate()

    def compute_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        loss, output = self.find_loss(model, inputs, self.share(inputs, num_items_in_batch))
        return (loss, output) if return_outputs else loss

    @abstractmethod
    def find_loss(
        self, model: torch.nn.Module, inputs: dict[str, Tensor], shares: Float[Tensor, " n"]
    ) -> tuple[Tensor, Any]:
        """Compute the part of a batch, with these shares, in the loss of the optimizer step, and the output."""

    @torch.no_grad()
    def prediction_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the loss of a batch, and what its metrics need."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss, output = self.compute_loss(model, inputs, return_outputs=True)
        return loss.detach(), *self.read_output(output, inputs)

    @abstractmethod
    def read_output(self, output: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Take from the output for a batch what the metrics need: numbers, and labels beside them."""

    @abstractmethod
    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """Compute the metrics from the results of `read_output` for all batches."""

    @abstractmethod
    def metric_names(self) -> list[str]:
        """Names of the metrics that `metrics` returns for the evaluation data."""

    # --- batches ---

    def collate(self, batch: Any) -> Any:
        """Return the batch as it is: the data set makes whole batches, not single rows."""
        return batch

    def get_train_dataloader(self) -> DataLoader:
        # accelerate does not prepare this loader: it would repeat rows to fill the last batch
        data: Any = self.train_dataset
        return DataLoader(
            data,
            batch_sampler=self.batches,
            collate_fn=self.collate_for_training,
            pin_memory=self.args.device.type == "cuda" and not self.captures,  # captured steps copy batches themselves
        )

    def collate_for_training(self, batch: Any) -> Any:
        """Pad a batch to one of few shapes if steps are captured, each of which is for one shape."""
        if self.captures:
            rounded = -(-batch["input_ids"].shape[1] // LENGTH_STEP) * LENGTH_STEP
            batch = pad_batch(batch, self.batches.rows_at_once, min(rounded, int(self.batches.lengths.max())))
        return self.collate(batch)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Evaluate the longest rows first: batches need little padding, and full memory shows in the first one."""
        return np.argsort(-eval_dataset.lengths, kind="stable").tolist()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Number of texts and of positions in the whole optimizer step, over all micro-batches and processes."""
        counts = torch.stack([self.count_items(batch) for batch in batch_samples]).sum(0)
        counts = counts if self.captures else counts.to(device)
        return self.accelerator.reduce(counts, "sum") if self.args.world_size > 1 else counts

    def count_items(self, batch: dict[str, Tensor]) -> Float[Tensor, " n"]:
        """Numbers of texts, of positions, and of other items of a batch over which a loss takes the mean."""
        return count_items(batch["loss_mask"])

    def share(self, batch: dict[str, Tensor], num_items_in_batch: Tensor | None) -> Float[Tensor, " n"]:
        """Share of a micro-batch in the texts, in the positions and in the other items of the whole optimizer step."""
        here = self.count_items(batch)
        if num_items_in_batch is None:
            return here / here.clamp(min=1)
        return here / num_items_in_batch.clamp(min=1) * self.args.world_size  # the mean over processes is taken later

    def count_tokens(self, inputs: dict[str, Tensor]) -> int:
        """Number of tokens that the model reads in a batch, without padding."""
        return int(inputs["attention_mask"].sum())  # of a batch in main memory, so that no GPU is waited for

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 6 * inputs["input_ids"].numel() * self._num_weights

    @cached_property
    def _num_weights(self) -> int:
        """Number of weights without embeddings, counted once and not in every step."""
        model: Any = self.model
        return model.num_parameters(exclude_embeddings=True)

    # --- steps ---

    def training_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: torch.nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        try:
            loss = self.add_gradients(model, inputs, num_items_in_batch)
        except (RuntimeError, MemoryError) as error:
            if self.args.world_size == 1 and fills_memory(error):
                self._stop_for_memory(model, error)
            raise
        self.tokens_seen += self.count_tokens(inputs)
        self.unchecked.append(StepLoss(self.state.global_step + 1, loss, inputs["rows"]))
        if len(self.unchecked) >= STEPS_UNCHECKED:
            self._check_losses()
        return loss

    def add_gradients(
        self, model: torch.nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | None
    ) -> Tensor:
        """Add the gradients of a micro-batch to those of the weights, by a captured step if possible; returns its loss.

        All numbers that differ between steps are in the batch, since a captured step computes with the same others.
        """
        inputs = inputs | {"epoch": torch.tensor(int(self.state.epoch or 0))}
        if not self.captures or num_items_in_batch is None:
            return self._compute_gradients(model, inputs, num_items_in_batch)
        if self.captured is None:

            def step(batch: dict[str, Tensor]) -> Tensor:
                rest = {name: values for name, values in batch.items() if name != "num_items"}
                return self._compute_gradients(model, rest, batch["num_items"])

            self.captured = CapturedSteps(step, model.parameters(), self.args.device)
        if not model.training:
            model.train()
        return self.captured.run(inputs | {"num_items": num_items_in_batch})

    def _compute_gradients(
        self, model: torch.nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | None
    ) -> Tensor:
        with known_positions():
            return super().training_step(model, inputs, num_items_in_batch)

    def _stop_for_memory(self, model: torch.nn.Module, error: Exception) -> NoReturn:
        """Save the steps that are finished, and say how to go on; gradients alone have changed since."""
        traceback.clear_frames(error.__traceback__)  # they hold what filled the memory
        self.forget_captures()
        empty_cache()
        self._check_losses()
        step = self.state.global_step
        if step and not (Path(self.settings.out) / f"checkpoint-{step}").exists():
            self._save_checkpoint(model, None)
        reason = error.message if isinstance(error, RadqError) else first_line(error)
        rows = self.batches.rows_at_once
        change = f"--micro-batch-size {rows // 2}, which needs less" if rows > 1 else "nothing else in the memory"
        raise MemoryLimitError(
            f"memory is full in step {step + 1} of {self.state.max_steps}: {reason.rstrip('.')}; "
            f"{self._last_checkpoint()}.",
            f"go on with --resume --out {self.run_folder} and {change}.",
        ) from error

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        if self.captured is None:
            return super()._clip_grad_norm(model)
        # the trained weights alone: looking for all weights takes longer than the clipping
        return self.accelerator.clip_grad_norm_(self.captured.parameters, self.args.max_grad_norm)

    def forget_captures(self) -> None:
        """Free the memory of captured steps, and capture no more if that was not possible."""
        self.captures = self.captures and (self.captured is None or self.captured.on)
        self.captured = None

    # --- losses and weights must be finite ---

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self._check_losses()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _check_losses(self) -> None:
        """Stop at a loss that is NaN or infinite, before it is logged and weights after it are saved or evaluated.

        Reading a loss makes the program wait for the GPU, so losses are read all together and not in every step.
        """
        unchecked, self.unchecked = self.unchecked, []
        if not unchecked or bool(torch.stack([step.loss for step in unchecked]).isfinite().all()):
            return
        first = next(step for step in unchecked if not bool(step.loss.isfinite()))
        rows = [str(row + 1) for row in first.rows.tolist() if row >= 0]
        named = ", ".join(rows[:ROWS_NAMED]) + (", …" if len(rows) > ROWS_NAMED else "")
        raise TrainingError(
            f"the loss is {first.loss.item()} at step {first.step}, in a batch with the rows {named} "
            "(counted from 1 over all data, without those left out).",
            f"lower --learning-rate, or look at these rows; {self._last_checkpoint()}.",
        )

    def _check_weights(self) -> None:
        """Refuse to save weights that are NaN or infinite; a step that is too large makes them from a finite loss."""
        model: Any = self.model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        own = [part.to_local() if hasattr(part, "to_local") else part for part in trained]  # FSDP's share here
        broken = torch.stack([~part.isfinite().all() for part in own]).sum() if own else torch.zeros(())
        if self.args.world_size > 1:  # all processes stop, or none does
            broken = self.accelerator.reduce(broken.to(self.args.device), "sum")
        if broken > 0:  # pyright: ignore[reportOperatorIssue]
            raise TrainingError(
                f"the weights are not finite after step {self.state.global_step}.",
                f"lower --learning-rate; {self._last_checkpoint()}.",
            )

    def _last_checkpoint(self) -> str:
        checkpoints = find_checkpoints(self.settings.out)
        return f"the last good checkpoint is {str(checkpoints[-1])!r}" if checkpoints else "there is no checkpoint yet"

    # --- logs and checkpoints ---

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and start_time is not None:
            logs["tokens_per_second"] = round(self.tokens_seen * self.args.world_size / (time.time() - start_time))
        super().log(logs, start_time)

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.settings.out) / ".saving")

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Save into another folder and then rename it, so that a checkpoint is complete or not there."""
        out, saving = Path(self.settings.out), Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
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
                    write_checksums(saving / name)
                    shutil.rmtree(out / name, ignore_errors=True)
                    (saving / name).rename(out / name)
        finally:
            if self.is_world_process_zero():
                shutil.rmtree(saving, ignore_errors=True)
        for old in find_checkpoints(out)[:-CHECKPOINTS_KEPT] if self.is_world_process_zero() else ():
            if str(old) != self.state.best_model_checkpoint:
                shutil.rmtree(old, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    # --- the best evaluation ---

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Ask for a checkpoint if this evaluation is the best; stop after too many evaluations without a new best."""
        better = super()._determine_best_metric(metrics, trial)
        name, best = f"eval_{self.settings.best_metric}", self.state.best_global_step or 0
        worse = sum(name in line and line["step"] > best for line in self.state.log_history)
        if self.settings.chooses_best and better:
            self.control.should_save = True
        elif self.settings.early_stopping and worse >= self.settings.early_stopping:
            self.control.should_training_stop = True
            self.control.should_save = False  # a resumed run repeats these steps and stops here again
        return better

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with quiet():  # transformers would report tied weights, which are stored once, and weights of frozen backbones
            super()._load_from_checkpoint(resume_from_checkpoint, model)
