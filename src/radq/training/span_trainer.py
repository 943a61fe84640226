"""The trainer of reward models on labels of spans: each token has a label of its own, or none and no loss.

Its batches are those of `radq.data.spans`.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import EvalPrediction

from radq.training.losses import LOSSES
from radq.training.reward_trainer import RewardTrainer, compute_metrics, constant_metrics
from radq.training.trainer import count_items


class SpanTrainer(RewardTrainer):
    """transformers' Trainer for reward models, on labels of tokens."""

    def row_loss(self, rewards: Float[Tensor, "b t a"], inputs: dict[str, Tensor]) -> Float[Tensor, ""]:
        """The mean over the texts of a batch of the mean loss of their tokens that have labels."""
        loss_mask = inputs["loss_mask"]
        shares = loss_mask / loss_mask.sum(1, keepdim=True).clamp(min=1)
        loss = LOSSES[self.config.loss].compute(rewards, loss_mask, inputs["token_labels"], inputs["weights"], shares)
        num_texts, _ = count_items(loss_mask)
        return loss * len(loss_mask) / num_texts.clamp(min=1)

    def read_output(self, output: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the reward of each token, and beside its label whether it has one."""
        rewards = self.reward_model.link(output.rewards).float()
        counted = inputs["loss_mask"][..., None].float()
        return rewards, torch.cat([inputs["token_labels"], counted], dim=-1)

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        labels, counted = np.moveaxis(np.asarray(prediction.label_ids), -1, 0)  # (n, t) each; padding is −100
        chosen = counted == 1
        return self._measure(np.asarray(prediction.predictions)[..., 0][chosen], labels[chosen])

    def metric_names(self) -> list[str]:
        data: Any = self.eval_dataset
        labels = data.token_labels
        names = self._measure(np.ones_like(labels), labels)
        return [name for name in names if not name.startswith(("constant_", "chance_"))]

    def _measure(self, rewards: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Compute the metrics of tokens as of texts that end with them; no metrics if no token has a label."""
        if not len(labels):
            return {}
        train: Any = self.train_dataset
        attributes, column = self.reward_model.config.attributes, labels[:, None]
        stats = np.stack([rewards, (rewards - labels) ** 2], axis=1)
        metrics = compute_metrics(stats, column, attributes)
        del metrics["last_token_mse"]  # the same
        return metrics | constant_metrics(column, np.ones(len(labels)), train.mean_labels, attributes, None)
