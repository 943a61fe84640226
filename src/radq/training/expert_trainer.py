"""Trainer of language models of classes of texts, for DExperts and GeDi. `radq.training.experts` runs it.

Axes: b batch, t time, c classes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel

from radq.data.dataset import RewardData
from radq.guides.expert import class_log_posterior
from radq.numerics import log_probabilities
from radq.sources.hub import quiet
from radq.training.config import ExpertTrainingConfig
from radq.training.losses import gedi_loss, text_loss
from radq.training.trainer import BatchTrainer

EQUAL_PRIORS = (0.0, 0.0)  # logarithms, up to a constant


@dataclass(frozen=True)
class TextFormat:
    """BOS and control code before a text, end token after it."""

    beginnings: list[list[int]]  # token ids of BOS and control code: one list for DExperts, one per class for GeDi
    end: int | None
    max_length: int  # a text of so many tokens may have been cut off, so no end token follows it


class ExpertTrainer(BatchTrainer):
    """transformers' Trainer for language models of classes of texts."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExpertTrainingConfig,
        text_format: TextFormat,
        train_dataset: RewardData,
        eval_dataset: RewardData | None = None,
        progress: bool = False,
    ):
        self.config, self.text_format = config, text_format
        if config.method == "gedi":
            model.gedi_scale = nn.Parameter(torch.ones(1))
        super().__init__(model, config, train_dataset, eval_dataset, progress)

    def collate(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put the end token after each text that was not cut off."""
        lengths = batch["attention_mask"].sum(1)
        padded = {name: F.pad(batch[name], (0, 1)) for name in ("input_ids", "attention_mask", "loss_mask")}
        ended = (lengths > 0) & (lengths < self.text_format.max_length)
        if self.text_format.end is not None:
            rows, columns = ended.nonzero().squeeze(1), lengths[ended]
            padded["input_ids"][rows, columns] = self.text_format.end
            padded["attention_mask"][rows, columns] = padded["loss_mask"][rows, columns] = 1
        return batch | padded

    def count_tokens(self, inputs: dict[str, Tensor]) -> int:
        return super().count_tokens(inputs) * len(self.text_format.beginnings)

    def compute_loss(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        loss_mask, weights = inputs["loss_mask"], inputs["weights"]
        texts, positions = self.share(inputs, num_items_in_batch)
        output = self.score_texts(model, inputs)
        if output.log_posterior is None:
            loss = text_loss(output.log_probabilities, loss_mask, weights) * positions
        else:
            mean = gedi_loss(output.log_probabilities, output.log_posterior, loss_mask, weights, self.config.gen_weight)
            loss = mean * len(loss_mask) / loss_mask.any(1).sum().clamp(min=1) * texts
        return (loss, output) if return_outputs else loss

    def score_texts(self, model: nn.Module, inputs: dict[str, Tensor]) -> "ClassScores":
        """Compute how likely each text is in its own class and, for GeDi, how likely its class is for the text."""
        scores = score_classes(model, self.text_format.beginnings, inputs["input_ids"])  # (c, b, t)
        if len(self.text_format.beginnings) == 1:
            return ClassScores(scores[0], None)
        loss_mask = inputs["loss_mask"]
        own = (inputs["labels"][:, 0] < self.config.threshold).long()[None]  # (1, b): 0 is the high class
        lengths = loss_mask.sum(1).clamp(min=1)
        scale: Any = self.model.gedi_scale  # pyright: ignore[reportOptionalMemberAccess]
        posterior = class_log_posterior((scores * loss_mask).sum(2), lengths, scale, EQUAL_PRIORS)  # (2, b)
        own_scores = scores.gather(0, own[..., None].expand(1, *loss_mask.shape))[0]
        return ClassScores(own_scores, posterior.gather(0, own)[0])

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with quiet():
            super()._save(output_dir, state_dict)

    def read_output(self, output: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute for each text −log P, the number of tokens and the log-posterior of its class."""
        loss_mask = inputs["loss_mask"]
        columns = [-(output.log_probabilities * loss_mask).sum(1), loss_mask.sum(1).float()]
        if output.log_posterior is not None:
            columns.append(output.log_posterior)
        return torch.stack(columns, dim=1), inputs["labels"]

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        stats = np.asarray(prediction.predictions)
        metrics = {"perplexity": float(np.exp(stats[:, 0].sum() / stats[:, 1].sum()))}
        if stats.shape[1] == 3:
            metrics["accuracy"] = float((stats[:, 2] > np.log(0.5)).mean())
        return metrics

    def metric_names(self) -> list[str]:
        return ["perplexity", *(["accuracy"] if self.config.method == "gedi" else [])]


class ClassScores(NamedTuple):
    """Log-probabilities of a batch of texts, each in the class that its label puts it into."""

    log_probabilities: Float[Tensor, "b t"]  # of each token
    log_posterior: Float[Tensor, " b"] | None  # of the class, given the text; None for DExperts


def score_classes(
    model: nn.Module, beginnings: list[list[int]], input_ids: Int[Tensor, "b t"]
) -> Float[Tensor, "c b t"]:
    """Log-probability of every token of right-padded texts after each beginning, all in one forward pass."""
    b, t = input_ids.shape
    longest = max(map(len, beginnings))
    runs = [
        F.pad(
            torch.cat([*(input_ids.new_full((b, 1), token) for token in beginning), input_ids[:, :-1]], dim=1),
            (0, longest - len(beginning)),
        )
        for beginning in beginnings
    ]
    logits = model(input_ids=torch.cat(runs), use_cache=False).logits.chunk(len(beginnings))
    starts = [len(beginning) - 1 for beginning in beginnings]
    return torch.stack(
        [log_probabilities(part[:, n : n + t], input_ids) for n, part in zip(starts, logits, strict=True)]
    )
