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

from radq.backbones import quiet
from radq.checkpoints import STATE, find_checkpoints, seal
from radq.data import GlobalBatches, RewardData
from radq.errors import OptionError, TrainingError
from radq.files import explained_writing, whole_file
from radq.losses import LOSSES, baseline_loss, distillation_loss, prefix_weights
from radq.models import RewardModel
from radq.settings import RewardTrainingConfig, TrainingConfig
from radq.statistics import area_under_curve
from radq.training_arguments import make_arguments

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
        """From what `prediction_step` returns of all batches."""

    @abstractmethod
    def metric_names(self) -> list[str]:
        """What `metrics` will return for the evaluation data."""

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
            regulariser = baseline_loss(output.marginals, mask) * share[1]
            if self.config.teacher:
                regulariser = regulariser / output.marginals.shape[-1]  # the mean over attributes, as the distance is
            loss = loss + self.config.reg_weight * regulariser
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
        """Loss, statistics of each utterance, its responses and weight.

        Statistics are the rewards at its last token, weighted squared errors if there are labels, and if there is a
        teacher the distance to it, the number of tokens, and sums of the teacher's rewards and of their squares.
        """
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
            targets = self._targets(inputs)
            distance = (rewards - targets).square().mean(-1) * mask
            columns += [distance.sum(1, keepdim=True), mask.sum(1, keepdim=True).float()]
            columns += [(targets * mask[..., None]).sum(1), (targets.square() * mask[..., None]).sum(1)]
        return loss.detach(), torch.cat(columns, dim=1), torch.cat([responses, inputs["weights"][:, None]], dim=1)

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        labels = np.asarray(prediction.label_ids)
        responses, weights = labels[:, :-1], labels[:, -1]
        model: Any = self.model
        attributes = model.config.attributes
        metrics = compute_metrics(np.asarray(prediction.predictions), responses, attributes)
        if responses.shape[1]:
            train: Any = self.train_dataset
            loss = None if self.config.teacher else self.config.loss
            metrics |= constant_metrics(responses, weights, train.mean_responses, attributes, loss)
        return metrics

    def metric_names(self) -> list[str]:
        data: Any = self.eval_dataset
        model: Any = self.model
        a = len(model.config.attributes)
        responses, weights = data.labels[data.rows], data.weights[data.rows]
        width = a * (1 + bool(responses.shape[1])) + (2 + 2 * a) * bool(self.config.teacher)
        labels: Any = np.concatenate([responses, weights[:, None]], axis=1)
        return list(self.metrics(EvalPrediction(np.ones((len(data), width)), labels)))


def give_own_rate(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], rate: float) -> None:
    """Move parameters to groups of their own, which keep all other settings."""
    chosen = {id(parameter) for parameter in parameters}
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if moved:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
            optimizer.add_param_group({**group, "params": moved, "lr": rate})


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
        metrics |= _with_each("weighted_mse", errors, attributes)
        metrics["last_token_mse"] = float(((last - responses) ** 2).mean())
        for column, attribute in enumerate(attributes):
            label = responses[:, column]
            if set(np.unique(label)) == {0.0, 1.0}:
                metrics[f"auc_{attribute}"] = area_under_curve(last[:, column], label)
                metrics[f"accuracy_{attribute}"] = float(((last[:, column] > 0.5) == (label > 0.5)).mean())
    rest = stats[:, a * (2 if responses.shape[1] else 1) :]
    if rest.shape[1]:
        distances, tokens, *sums = rest.astype(np.float64).sum(0)
        metrics["distillation_mse"] = float(distances / tokens)
        means, squares = np.array(sums[:a]) / tokens, np.array(sums[a:]) / tokens
        metrics["constant_distillation_mse"] = float((squares - means**2).mean())
    return metrics


def constant_metrics(
    responses: np.ndarray, weights: np.ndarray, constant: np.ndarray, attributes: list[str], loss: str | None
) -> dict[str, float]:
    """The same numbers of a predictor that always says `constant`, (a,), and its loss where there is one on responses.

    The mean of the training responses is the best constant under squared errors and under cross-entropy alike.
    """
    errors = (responses - constant) ** 2  # the same at every token, and the weights of the tokens sum to 1
    metrics = _with_each("constant_weighted_mse", errors, attributes)
    if loss == "ce":
        share = constant.clip(1e-7, 1 - 1e-7)
        errors = -responses * np.log(share) - (1 - responses) * np.log(1 - share)
    if loss is not None:
        metrics["constant_loss"] = float((errors.sum(1) * weights).mean())
    return metrics


def _with_each(name: str, errors: np.ndarray, attributes: list[str]) -> dict[str, float]:
    """The mean of errors, (n, a), and of several attributes that of each."""
    each = {f"{name}_{attribute}": float(errors[:, n].mean()) for n, attribute in enumerate(attributes)}
    return {name: float(errors.mean())} | (each if len(attributes) > 1 else {})


def point_to_best(state: TrainerState, out: Path) -> None:
    """Where the best checkpoint lies: the Trainer has seen it where it was saved before it was moved."""
    if state.best_global_step:
        state.best_model_checkpoint = str(out / f"checkpoint-{state.best_global_step}")


def _count(mask: Tensor) -> Float[Tensor, "2"]:
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
    """What a resumed run takes from its settings, not from the checkpoint; and an evaluation of the last weights."""

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
    """Of a line of metrics.jsonl; one that a kill or a full disk has cut is of no step."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
