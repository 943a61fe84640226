"""The trainer of reward models, with their losses and metrics. `radq.training.reward` runs it.
The random tokens of the regulariser depend on row, position and epoch alone, so that micro-batches and the number of
processes do not change them.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import EvalPrediction

from radq.data.dataset import RewardData
from radq.judges.agreement import area_under_curve, chance_auc, chance_correlation, rank_correlation
from radq.models.loading import evaluating
from radq.models.reward import RewardModel
from radq.numerics import take_last
from radq.training.candidate_agreement import compare_rewards, metrics_of
from radq.training.candidates import UNUSED, CandidateFeed, CandidateSet
from radq.training.config import RewardTrainingConfig
from radq.training.losses import (
    LOSSES,
    baseline_loss,
    candidate_loss,
    difference_loss,
    distillation_loss,
    prefix_weights,
)
from radq.training.teacher import Teacher
from radq.training.trainer import BatchTrainer, count_items


class RewardTrainer(BatchTrainer):
    """transformers' Trainer for reward models, on labels or on the rewards of a teacher."""

    def __init__(
        self,
        model: RewardModel,
        config: RewardTrainingConfig,
        train_dataset: RewardData,
        eval_dataset: RewardData | None = None,
        teacher: RewardModel | Teacher | None = None,
        progress: bool = False,
    ):
        self.config = config
        self.teacher = teacher  # no part of the model, so that it is neither trained nor saved
        self.feed: CandidateFeed | None = None  # of prefixes that are learnt beside the texts
        self.held_out: CandidateSet | None = None  # candidates with which the agreement is measured
        super().__init__(model, config, train_dataset, eval_dataset, progress)
        if teacher is not None:
            teacher.requires_grad_(False).eval().to(self.args.device)  # pyright: ignore[reportArgumentType]
            for part in teacher.modules():
                if isinstance(part, RewardModel):
                    part.may_change = False  # so that a captured step need not wait for the answer

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.config.head_learning_rate is not None:
            head: Any = self.model.head  # pyright: ignore[reportOptionalMemberAccess]
            set_learning_rate(optimizer, list(head.parameters()), self.config.head_learning_rate)
        return optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._saves_adapters:
            self._load_adapters(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self._saves_adapters and self.state.best_model_checkpoint is not None:
            self._load_adapters(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    @property
    def _saves_adapters(self) -> bool:
        """Whether checkpoints hold only adapters, or a readout, and the head; those of FSDP also hold whole models."""
        model: Any = self.model
        return model.config.beside_backbone and not self.is_fsdp_enabled

    def _load_adapters(self, checkpoint: str) -> None:
        """Load adapters from a checkpoint, which transformers' Trainer cannot do: it expects whole models."""
        model: Any = self.model
        model.load_trained(checkpoint)

    # --- batches ---

    def collate_for_training(self, batch: Any) -> Any:
        """Add prefixes to the texts of a batch; if steps are captured, to the shape that all batches have."""
        batch = super().collate_for_training(batch)
        if self.feed is None:
            return batch
        num_texts = len(batch["rows"]) if self.captures else None
        return batch | self.feed.batch(batch["rows"].numpy(), self.batches.epoch, num_texts)

    def count_items(self, batch: dict[str, Tensor]) -> Float[Tensor, " n"]:
        counts = super().count_items(batch)
        if "candidates" not in batch:
            return counts
        return torch.cat([counts, (batch["candidates"] >= 0).sum()[None].float()])

    def count_tokens(self, inputs: dict[str, Tensor]) -> int:
        prefixes = inputs.get("prefix_mask")
        return super().count_tokens(inputs) + (0 if prefixes is None else int(prefixes.sum()))

    # --- losses ---

    def compute_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        loss_mask = inputs["loss_mask"]
        texts, positions, *candidates = self.share(inputs, num_items_in_batch)
        output = model(**read_texts(inputs), **self._random_tokens(inputs))
        if self.config.learns_tokens:
            loss = distillation_loss(output.rewards, loss_mask, self._targets(inputs)) * positions
        else:
            loss = self.row_loss(output.rewards, inputs) * texts
        if output.marginals is not None:
            regulariser = baseline_loss(output.marginals, loss_mask) * positions
            if self.config.learns_tokens:  # the mean over attributes, as in the distillation loss
                regulariser = regulariser / output.marginals.shape[-1]
            loss = loss + self.config.reg_weight * regulariser
        for share in candidates:
            loss = loss + self._candidate_loss(model, inputs) * share
        return (loss, output) if return_outputs else loss

    def row_loss(self, rewards: Float[Tensor, "b t a"], inputs: dict[str, Tensor]) -> Float[Tensor, ""]:
        """The mean of the loss on labels over the texts of a batch that have tokens."""
        loss_mask = inputs["loss_mask"]
        loss = LOSSES[self.config.loss].compute(rewards, loss_mask, inputs["labels"], inputs["weights"])
        num_texts, _ = count_items(loss_mask)
        return loss * len(loss_mask) / num_texts.clamp(min=1)

    def _candidate_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Float[Tensor, ""]:
        """Compute the loss on the candidates of the prefixes that come with a batch of texts.

        They are read in a forward pass of their own, since prefixes and texts differ in length.
        """
        rewards = self._compare(model, inputs)
        targets, used = inputs["candidate_targets"], inputs["candidates"] >= 0
        loss = self.config.candidate_weight * candidate_loss(rewards, targets, used)
        return loss + self.config.difference_weight * difference_loss(rewards, targets, used)

    def _compare(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Float[Tensor, "b p k a"]:
        """Compute the student's head outputs for candidates."""
        return model(
            input_ids=inputs["prefix_ids"],
            attention_mask=inputs["prefix_mask"],
            positions=inputs["positions"],
            candidates=inputs["candidates"],
        ).candidates

    def _random_tokens(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Make the model's argument with random tokens for the regulariser; no argument if there is no regulariser."""
        model: Any = self.model
        if self.config.kind == "v" or self.config.reg_weight == 0 or not model.training:
            return {}
        return {"random_tokens": random_tokens(inputs, model.vocabulary.size, self.config.seed, inputs["epoch"])}

    def _targets(self, inputs: dict[str, Tensor]) -> Float[Tensor, "b t a"]:
        """Take the teacher's rewards from the batch if they were computed before training, else compute them."""
        if "targets" in inputs:
            return inputs["targets"]
        assert self.teacher is not None
        with torch.no_grad(), self.accelerator.autocast():  # in the precision of the student
            return self.teacher.token_rewards(inputs["input_ids"], inputs["attention_mask"]).float()

    # --- evaluation ---

    def read_output(self, output: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute statistics of each text, and its labels and weight.

        The statistics are columns: the rewards at the last token; weighted squared errors if there are labels; and if
        there is a teacher the squared distance to it, the number of tokens, and the sums of the teacher's rewards and
        of their squares.
        """
        reward_model: Any = self.model
        rewards = reward_model.link(output.rewards)
        loss_mask, labels = inputs["loss_mask"], inputs["labels"]
        columns = [take_last(rewards, loss_mask)]
        if labels.shape[1]:
            errors = (rewards - labels[:, None]).square() * prefix_weights(loss_mask)[..., None]
            columns.append(errors.sum(1))
        if self.config.learns_tokens:
            targets = self._targets(inputs)
            distance = (rewards - targets).square().mean(-1) * loss_mask
            columns += [distance.sum(1, keepdim=True), loss_mask.sum(1, keepdim=True).float()]
            columns += [(targets * loss_mask[..., None]).sum(1), (targets.square() * loss_mask[..., None]).sum(1)]
        return torch.cat(columns, dim=1), torch.cat([labels, inputs["weights"][:, None]], dim=1)

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        labels, weights = np.split(np.asarray(prediction.label_ids), [-1], axis=1)
        model: Any = self.model
        attributes = model.config.attributes
        metrics = compute_metrics(np.asarray(prediction.predictions), labels, attributes)
        if labels.shape[1]:
            train: Any = self.train_dataset
            loss = None if self.config.learns_tokens else self.config.loss
            metrics |= constant_metrics(labels, weights[:, 0], train.mean_labels, attributes, loss)
        return metrics | self.measure_candidates()

    @torch.no_grad()
    def measure_candidates(self) -> dict[str, float]:
        """Measure the agreement with the teacher about held-out candidates; no metrics if there are none."""
        held_out, model, wrapped = self.held_out, self.reward_model, self.model_wrapped
        if held_out is None or wrapped is None:
            return {}
        rewards = []
        size = self.args.per_device_eval_batch_size
        with evaluating(model), self.compute_loss_context_manager():
            for first in range(0, len(held_out), size):
                batch = held_out.batch(range(first, min(first + size, len(held_out))))
                inputs = {name: values.to(self.args.device) for name, values in batch.items()}
                rewards.append(model.link(self._compare(wrapped, inputs)).double().cpu().numpy())
        found, k = np.concatenate(rewards), held_out.candidates.shape[2]
        a = len(model.config.attributes)
        used = held_out.candidates.reshape(-1, k) != UNUSED
        return metrics_of(
            compare_rewards(found.reshape(-1, k, a), held_out.targets.reshape(-1, k, a), used), model.config.attributes
        )

    def _evaluate_end(self) -> dict[str, float]:
        """Compute the metrics of the last weights. The agreement is measured also if no texts are held out."""
        metrics = super()._evaluate_end()
        if self.held_out is not None and "eval_candidate_error" not in metrics:
            found = {f"eval_{name}": value for name, value in self.measure_candidates().items()}
            self.log(dict(found))
            metrics |= found
        return metrics

    @property
    def reward_model(self) -> RewardModel:
        """The model that is trained."""
        model: Any = self.model
        return model

    def metric_names(self) -> list[str]:
        data: Any = self.eval_dataset
        model: Any = self.model
        a = len(model.config.attributes)
        labels, weights = data.labels[data.rows], data.weights[data.rows]
        width = a * (1 + bool(labels.shape[1])) + (2 + 2 * a) * bool(self.config.learns_tokens)
        label_ids: Any = np.concatenate([labels, weights[:, None]], axis=1)
        names = self.metrics(EvalPrediction(np.ones((len(data), width)), label_ids))
        unchanging = ("constant_", "chance_")  # training does not change these
        agreement = ["candidate_correlation", "candidate_error"] if self.config.base else []
        return [name for name in [*names, *agreement] if not name.startswith(unchanging)]


def read_texts(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take from a batch the arguments with which a model reads its texts, with stored states where there are some."""
    return {name: inputs[name] for name in ("input_ids", "attention_mask", "states") if name in inputs}


def set_learning_rate(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], rate: float) -> None:
    """Move parameters into groups of the optimizer with another learning rate; their other settings stay."""
    chosen = {id(parameter) for parameter in parameters}
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if moved:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
            optimizer.add_param_group({**group, "params": moved, "lr": rate})


def random_tokens(
    inputs: dict[str, Tensor], vocab_size: int, seed: int, epoch: int | Int[Tensor, ""]
) -> Int[Tensor, "b t"]:
    """Compute a uniformly random token per position from a hash of text, position, epoch and seed.

    The result is the same on every machine.
    """
    input_ids = inputs["input_ids"]
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    texts = inputs.get("texts", inputs["rows"])  # those of pairs have numbers of their own
    state = texts[:, None] * 0x9E3779B1 + positions * 0x85EBCA77 + (epoch * 0x27D4EB2F + seed * 0x165667B1)
    for factor in (0x2C1B3C6D, 0x297A2D39):  # integer mixing in 32 bits, held in 64
        state = state & 0xFFFFFFFF
        state = ((state ^ (state >> 15)) * factor) & 0xFFFFFFFF
        state = state ^ (state >> 13)
    return state % vocab_size


def compute_metrics(stats: np.ndarray, labels: np.ndarray, attributes: list[str]) -> dict[str, float]:
    """Compute means over texts from the statistics of `prediction_step`.

    Binary labels also have AUC and accuracy, other labels have the rank correlation with them. Labels that are missing,
    NaN, count nowhere, and an attribute without labels has no metrics.
    """
    a = len(attributes)
    metrics: dict[str, float] = {}
    if labels.shape[1]:
        last, errors = stats[:, :a], stats[:, a : 2 * a]
        known = ~np.isnan(labels)
        metrics |= _with_each("weighted_mse", errors, known, attributes)
        metrics |= _with_each("last_token_mse", (last - labels) ** 2, known, [])
        for column, attribute in enumerate(attributes):
            reward, label = (values[known[:, column], column] for values in (last, labels))
            if set(np.unique(label)) == {0.0, 1.0}:
                metrics[f"auc_{attribute}"] = area_under_curve(reward, label > 0.5)
                metrics[f"accuracy_{attribute}"] = float(((reward > 0.5) == (label > 0.5)).mean())
            elif len(label) > 1 and np.ptp(label) > 0:
                metrics[f"spearman_{attribute}"] = rank_correlation(reward, label) or 0.0
    rest = stats[:, a * (2 if labels.shape[1] else 1) :]
    if rest.shape[1]:
        distances, tokens, *sums = rest.astype(np.float64).sum(0)
        metrics["distillation_mse"] = float(distances / tokens)
        means, squares = np.array(sums[:a]) / tokens, np.array(sums[a:]) / tokens
        metrics["constant_distillation_mse"] = float((squares - means**2).mean())
    return metrics


def constant_metrics(
    labels: np.ndarray, weights: np.ndarray, constant: np.ndarray, attributes: list[str], loss: str | None
) -> dict[str, float]:
    """Compute the metrics of a predictor that always answers `constant`, (a,), with its loss if `loss` names one.

    The AUC or rank correlation that random answers reach in one of twenty cases stands beside them. The mean of the
    training labels is the best constant under squared error and under cross-entropy.
    """
    errors = (labels - constant) ** 2  # the same at every token, and the weights of the tokens sum to 1
    known = ~np.isnan(labels)
    metrics = _with_each("constant_weighted_mse", errors, known, attributes)
    for column, attribute in enumerate(attributes):
        label = labels[known[:, column], column]
        if set(np.unique(label)) == {0.0, 1.0}:
            metrics[f"chance_auc_{attribute}"] = chance_auc(int(label.sum()), int((1 - label).sum()))
        elif len(label) > 1 and np.ptp(label) > 0:
            metrics[f"chance_spearman_{attribute}"] = chance_correlation(len(label))
    if loss is not None:
        outputs = LOSSES[loss].head_output(torch.from_numpy(constant)).expand(len(labels), 1, -1)
        one_token = torch.ones(len(labels), 1)
        found = LOSSES[loss].compute(outputs, one_token, torch.from_numpy(labels), torch.from_numpy(weights))
        metrics["constant_loss"] = float(found)
    return metrics


def _with_each(name: str, errors: np.ndarray, known: np.ndarray, attributes: list[str]) -> dict[str, float]:
    """Average the known errors, both (n, a), over all under `name` and, if there are several attributes, of each."""
    found = {name: float(errors[known].mean())} if known.any() else {}
    if len(attributes) > 1:
        each = zip(attributes, errors.T, known.T, strict=True)
        found |= {f"{name}_{attribute}": float(e[k].mean()) for attribute, e, k in each if k.any()}
    return found
