"""The trainer of reward models on pairs of texts of which one is preferred.

Its batches hold two texts for each pair, see `radq.data.pairs`. The reward of a text is that of its last token.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import EvalPrediction

from radq.judges.agreement import chance_accuracy
from radq.models.config import simplify_ranges
from radq.models.loading import evaluating
from radq.numerics import take_last
from radq.training.losses import preference_loss
from radq.training.reward_trainer import RewardTrainer, read_texts

RANGE_PAIRS = 250  # pairs whose rewards decide about the range, at most
RANGE_QUANTILES = (0.01, 0.99)


class PairTrainer(RewardTrainer):
    """transformers' Trainer for reward models, on pairs of texts of which one is preferred."""

    def train_and_evaluate(self, checkpoint: Path | None) -> dict[str, float]:
        metrics = super().train_and_evaluate(checkpoint)
        self.reward_model.config.response_range = simplify_ranges(self.measure_range(), 1)
        return metrics

    def count_items(self, batch: dict[str, Tensor]) -> Float[Tensor, " n"]:
        """Numbers of pairs and of positions of a batch; a pair counts if both of its texts have tokens."""
        loss_mask = batch["loss_mask"]
        pairs = loss_mask.any(1).view(-1, 2).all(1)
        return torch.stack([pairs.sum(), loss_mask.sum()]).float()

    def row_loss(self, rewards: Float[Tensor, "b t a"], inputs: dict[str, Tensor]) -> Float[Tensor, ""]:
        """The mean of the loss over the pairs of a batch of which both texts have tokens."""
        loss = preference_loss(rewards, inputs["loss_mask"], inputs["weights"])
        num_pairs, _ = self.count_items(inputs)
        return loss * len(inputs["weights"]) / num_pairs.clamp(min=1)

    def read_output(self, output: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the rewards of both texts of each pair, and the weight of the pair."""
        return self._read_last(output.rewards, inputs), inputs["weights"][:, None]

    def _read_last(self, outputs: Float[Tensor, "b t 1"], inputs: dict[str, Tensor]) -> Float[Tensor, "p 2"]:
        """The rewards of whole texts: those of the preferred text and of the other one of each pair."""
        return take_last(self.reward_model.link(outputs), inputs["loss_mask"]).view(-1, 2)

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        return pair_metrics(np.asarray(prediction.predictions))

    def metric_names(self) -> list[str]:
        return ["pair_accuracy", "pair_margin"]

    @torch.no_grad()
    def measure_range(self) -> tuple[float, float]:
        """Quantiles of the rewards of whole texts that were trained on; guides clamp rewards to this range."""
        data: Any = self.train_dataset
        wrapped: Any = self.model_wrapped
        order = np.random.default_rng(self.config.seed).permutation(len(data))[:RANGE_PAIRS]
        order = order[np.argsort(-data.lengths[order], kind="stable")]
        chunks = np.array_split(order, math.ceil(len(order) / self.args.per_device_eval_batch_size))
        rewards = []
        with evaluating(self.reward_model), self.compute_loss_context_manager():
            for chunk in chunks:
                inputs: Any = self._prepare_inputs(data.batch(chunk.tolist()))
                output = wrapped(**read_texts(inputs))
                rewards.append(self._read_last(output.rewards, inputs).double().cpu().numpy())
        low, high = np.quantile(np.concatenate(rewards), RANGE_QUANTILES).tolist()
        return low, high


def pair_metrics(rewards: Float[np.ndarray, "p 2"]) -> dict[str, float]:
    """Compute the share of pairs whose preferred text, the first, has the larger reward, and their mean difference.

    Equal rewards count half. Beside them stand the share that random rewards reach in one of twenty cases, and the loss
    of equal rewards.
    """
    margins = rewards[:, 0].astype(np.float64) - rewards[:, 1]
    return {
        "pair_accuracy": float(((margins > 0) + 0.5 * (margins == 0)).mean()),
        "chance_pair_accuracy": chance_accuracy(len(margins)),
        "pair_margin": float(margins.mean()),
        "constant_loss": math.log(2),
    }
