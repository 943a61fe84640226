"""Objectives: what a reward model learns from the rows of a table, and the metrics that tell how well it does.

    objective = choose_objective(config, attributes, data)
    objective.loss(rewards, inputs, rows_share, positions_share)

Texts have labels, tokens of texts have labels (spans), tokens have the rewards of a teacher (distillation), or one text
of a pair is preferred to the other. Axes: b batch, t time, p pairs, a attributes, n texts, m numbers of a row.
"""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from radq.data.dataset import RewardData
from radq.judges.agreement import area_under_curve, chance_accuracy, chance_auc, chance_correlation, rank_correlation
from radq.numerics import take_last
from radq.training.config import RewardTrainingConfig
from radq.training.losses import LOSSES, baseline_loss, distillation_loss, preference_loss, prefix_weights
from radq.training.trainer import count_items

Inputs = dict[str, Tensor]  # a batch of rows
Share = Float[Tensor, ""]  # of a batch in the rows, or positions, of the whole optimizer step


class Objective:
    """Labels of texts, each of which holds for all tokens of its text; other objectives override what differs.

    Args:
        attributes: names of what is learnt.
        data: the rows to train on, whose mean labels are the constant that a model is compared with.
    """

    def __init__(self, config: RewardTrainingConfig, attributes: list[str], data: RewardData):
        self.config, self.attributes, self.data = config, attributes, data

    def count_items(self, batch: Inputs) -> Float[Tensor, "2"]:
        """Numbers of rows that have tokens, and of positions."""
        return count_items(batch["loss_mask"])

    def loss(self, rewards: Float[Tensor, "b t a"], inputs: Inputs, rows: Share, positions: Share) -> Share:
        """The part of a batch in the loss of the optimizer step: its mean over rows or positions, times its share."""
        num_rows, _ = self.count_items(inputs)
        return self.row_loss(rewards, inputs) * len(inputs["weights"]) / num_rows.clamp(min=1) * rows

    def row_loss(self, rewards: Float[Tensor, "b t a"], inputs: Inputs) -> Share:
        """The sum of the losses of all rows, divided by the number of rows in the batch."""
        return LOSSES[self.config.loss].compute(rewards, inputs["loss_mask"], inputs["labels"], inputs["weights"])

    def regulariser(self, marginals: Float[Tensor, "b t a"], inputs: Inputs, positions: Share) -> Share:
        """The part of a batch in the regulariser of the optimizer step."""
        return baseline_loss(marginals, inputs["loss_mask"]) * positions

    def statistics(self, rewards: Float[Tensor, "b t a"], inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Compute what the metrics need of a batch: numbers of each text or token, and labels beside them.

        Of a text these are the rewards at its last token and, if there are labels, its weighted squared errors; labels
        and weight stand beside them.
        """
        loss_mask, labels = inputs["loss_mask"], inputs["labels"]
        columns = [take_last(rewards, loss_mask)]
        if labels.shape[1]:
            errors = (rewards - labels[:, None]).square() * prefix_weights(loss_mask)[..., None]
            columns.append(errors.sum(1))
        return torch.cat(columns, dim=1), torch.cat([labels, inputs["weights"][:, None]], dim=1)

    def metrics(self, statistics: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Compute the metrics from the statistics of all batches, and from the labels beside them."""
        return self._measure(statistics, labels, self.config.loss)

    def _measure(self, statistics: np.ndarray, labels: np.ndarray, loss: str | None) -> dict[str, float]:
        labels, weights = np.split(labels, [-1], axis=1)
        metrics = compute_metrics(statistics, labels, self.attributes)
        if labels.shape[1]:
            metrics |= constant_metrics(labels, weights[:, 0], self.data.mean_labels, self.attributes, loss)
        return metrics

    def metric_names(self, data: RewardData) -> list[str]:
        """Names of the metrics of these rows, without those that training does not change."""
        return [name for name in self.metrics(*self.example(data)) if not name.startswith(("constant_", "chance_"))]

    def example(self, data: RewardData) -> tuple[np.ndarray, np.ndarray]:
        """Statistics that a model might have for these rows, and the labels beside them."""
        labels, weights = data.labels[data.rows], data.weights[data.rows]
        width = len(self.attributes) * (1 + bool(labels.shape[1]))
        return np.ones((len(data), width)), np.concatenate([labels, weights[:, None]], axis=1)


class Distillation(Objective):
    """Rewards of a teacher, one for each token; labels, if there are any, are used in the evaluation."""

    def loss(self, rewards: Float[Tensor, "b t a"], inputs: Inputs, rows: Share, positions: Share) -> Share:
        return distillation_loss(rewards, inputs["loss_mask"], inputs["targets"]) * positions

    def regulariser(self, marginals: Float[Tensor, "b t a"], inputs: Inputs, positions: Share) -> Share:
        return super().regulariser(marginals, inputs, positions) / marginals.shape[-1]  # a mean, as the loss is

    def statistics(self, rewards: Float[Tensor, "b t a"], inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Add to the numbers of a text the squared distance to the teacher, the number of tokens, and the sums of the
        teacher's rewards and of their squares.
        """
        numbers, labels = super().statistics(rewards, inputs)
        loss_mask, targets = inputs["loss_mask"], inputs["targets"]
        distance = (rewards - targets).square().mean(-1) * loss_mask
        columns = [distance.sum(1, keepdim=True), loss_mask.sum(1, keepdim=True).float()]
        columns += [(values * loss_mask[..., None]).sum(1) for values in (targets, targets.square())]
        return torch.cat([numbers, *columns], dim=1), labels

    def metrics(self, statistics: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return self._measure(statistics, labels, None)

    def example(self, data: RewardData) -> tuple[np.ndarray, np.ndarray]:
        numbers, labels = super().example(data)
        return np.pad(numbers, ((0, 0), (0, 2 + 2 * len(self.attributes))), constant_values=1), labels


class SpanObjective(Objective):
    """Labels of single tokens; a token without one has no loss. Batches are those of `radq.data.spans`."""

    def row_loss(self, rewards: Float[Tensor, "b t a"], inputs: Inputs) -> Share:
        loss_mask = inputs["loss_mask"]
        shares = loss_mask / loss_mask.sum(1, keepdim=True).clamp(min=1)
        return LOSSES[self.config.loss].compute(rewards, loss_mask, inputs["token_labels"], inputs["weights"], shares)

    def statistics(self, rewards: Float[Tensor, "b t a"], inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Take the reward of each token, and beside its label whether it has one."""
        counted = inputs["loss_mask"][..., None].float()
        return rewards.float(), torch.cat([inputs["token_labels"], counted], dim=-1)

    def metrics(self, statistics: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Compute the metrics of tokens as of texts that end with them; no metrics if no token has a label."""
        values, counted = np.moveaxis(labels, -1, 0)  # (n, t) each; padding is −100
        rewards, found = statistics[..., 0][counted == 1], values[counted == 1]
        if not len(found):
            return {}
        column = found[:, None]
        metrics = compute_metrics(np.stack([rewards, (rewards - found) ** 2], axis=1), column, self.attributes)
        del metrics["last_token_mse"]  # the same
        return metrics | constant_metrics(column, np.ones(len(found)), self.data.mean_labels, self.attributes, None)

    def example(self, data: RewardData) -> tuple[np.ndarray, np.ndarray]:
        labels: np.ndarray = data.token_labels  # pyright: ignore[reportAttributeAccessIssue]
        return np.ones((len(labels), 1, 1)), np.stack([labels, np.ones_like(labels)], axis=-1)[:, None]


class PairObjective(Objective):
    """Pairs of texts of which one is preferred. A batch holds two texts for each pair, see `radq.data.pairs`."""

    def count_items(self, batch: Inputs) -> Float[Tensor, "2"]:
        """Numbers of pairs and of positions; a pair counts if both of its texts have tokens."""
        loss_mask = batch["loss_mask"]
        pairs = loss_mask.any(1).view(-1, 2).all(1)
        return torch.stack([pairs.sum(), loss_mask.sum()]).float()

    def row_loss(self, rewards: Float[Tensor, "b t a"], inputs: Inputs) -> Share:
        return preference_loss(rewards, inputs["loss_mask"], inputs["weights"])

    def statistics(self, rewards: Float[Tensor, "b t a"], inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Take the rewards of both whole texts of each pair, and the weight of the pair."""
        return take_last(rewards, inputs["loss_mask"]).view(-1, 2), inputs["weights"][:, None]

    def metrics(self, statistics: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return pair_metrics(statistics)

    def example(self, data: RewardData) -> tuple[np.ndarray, np.ndarray]:
        return np.ones((1, 2)), np.ones((1, 1))


def choose_objective(config: RewardTrainingConfig, attributes: list[str], data: RewardData) -> Objective:
    """Choose the objective that the settings ask for."""
    kinds = {PairObjective: config.compares, SpanObjective: config.spans, Distillation: config.learns_tokens}
    return next((kind for kind, wanted in kinds.items() if wanted), Objective)(config, attributes, data)


# --- metrics ---


def compute_metrics(stats: np.ndarray, labels: np.ndarray, attributes: list[str]) -> dict[str, float]:
    """Compute means over texts from the statistics of an `Objective`.

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
