"""The aim of a training: losses as pure functions, and objectives that apply them to batches and measure the result.

    objective = choose_objective(config, attributes, data)
    objective.loss(rewards, inputs, rows_share, positions_share)

`loss_mask` is 1 at the tokens that the loss is about and 0 elsewhere: at prompts and at padding, which may stand on
either side. Axes: b batch, t time, a attributes, p positions or pairs, k candidates, s steps, n texts, m numbers of a
row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from radq.data.dataset import RewardData
from radq.judges.agreement import area_under_curve, chance_accuracy, chance_auc, chance_correlation, rank_correlation
from radq.numerics import at_least_float32, take_last
from radq.training.config import RewardTrainingConfig

Rewards = Float[Tensor, "b t a"]  # or head outputs, of the tokens of texts
Candidates = Float[Tensor, "b p k a"]  # the same of candidates at some places of texts
Mask = Int[Tensor, "b t"] | Bool[Tensor, "b t"] | Float[Tensor, "b t"]
Labels = Float[Tensor, "b a"] | Float[Tensor, "b t a"]
Weights = Float[Tensor, " b"]
Loss = Float[Tensor, ""]

# --- losses on labels ---


@dataclass(frozen=True)
class LabelLoss:
    """A loss on labels, as `--loss` names it: (1/B) Σ_i Σ_t λ_t Σ_a error(head output, label)."""

    error: Callable[..., Tensor]  # elementwise, of head outputs and labels, as functions of torch compute it
    head_output: Callable[[Tensor], Tensor]  # turns a reward into the head output that stands for it
    label_range: tuple[float, float] | None  # labels outside this range are refused; None allows all

    def __call__(
        self,
        rewards: Rewards,
        loss_mask: Mask,
        labels: Labels,
        weights: Weights | None = None,
        shares: Float[Tensor, "b t"] | None = None,
    ) -> Loss:
        """Compute the loss of a batch, where each text i is multiplied by its weight if there are weights.

        Labels are those of texts, or of each token. An attribute whose label is missing, NaN, has no error. If there
        are `shares` of the tokens of a text, they replace λ.
        """
        rewards = _zero_outside(rewards, loss_mask)
        labels = (labels if labels.dim() == 3 else labels[:, None]).to(rewards.dtype).expand_as(rewards)
        known = ~labels.isnan()
        errors = self.error(rewards, torch.where(known, labels, 0), reduction="none") * known  # NaN has no gradient
        shares = prefix_weights(loss_mask) if shares is None else shares
        texts = (errors * shares[..., None]).sum((1, 2))  # (b,)
        return (texts if weights is None else texts * weights).sum() / len(errors)


squared_loss = LabelLoss(F.mse_loss, lambda reward: reward, None)
cross_entropy_loss = LabelLoss(  # of σ(head output), finite also for the rewards 0 and 1
    F.binary_cross_entropy_with_logits, lambda reward: reward.logit(eps=1e-7), (0.0, 1.0)
)
LOSSES = {"mse": squared_loss, "ce": cross_entropy_loss}


def prefix_weights(loss_mask: Mask) -> Float[Tensor, "b t"]:
    """λ_t = t / (L (L + 1) / 2) at the t-th of L tokens in the mask, 0 elsewhere: the weights of a text sum to 1."""
    loss_mask = loss_mask.float()
    length = loss_mask.sum(1, keepdim=True)  # (b, 1)
    normaliser = (length * (length + 1) / 2).clamp(min=1)  # 1 for a text without tokens, whose weights are all 0
    return loss_mask.cumsum(1) * loss_mask / normaliser


# --- preferences ---


class PrefixPairs(NamedTuple):
    """The prefixes of two texts that are compared, in s steps; a step of weight 0 compares nothing."""

    chosen: Int[Tensor, "p s"]  # columns of the last tokens of prefixes of the preferred text,
    rejected: Int[Tensor, "p s"]  # and of the other text
    weights: Float[Tensor, "p s"]  # they sum to 1, or to 0 if a text has no tokens


def pair_prefixes(loss_mask: Mask) -> PrefixPairs:
    """Pair the prefixes of two texts, which are rows 2n and 2n + 1 of the mask.

    Let Λ_t = λ_1 + … + λ_t. For a number u that is drawn uniformly from 0 to 1, the prefix of each text is the first
    with Λ_t ≥ u, and the weight of two prefixes is the probability that they are drawn together. So both texts keep
    their weights λ whatever their lengths, the last prefixes are compared with each other, and texts of equal length
    are compared token by token.
    """
    mask = loss_mask.float()
    place, length = mask.cumsum(1), mask.sum(1, keepdim=True)
    reached = place * (place + 1) / (length * (length + 1)).clamp(min=1)  # (2p, t): Λ, exactly 1 at the end
    first, second = reached[0::2].contiguous(), reached[1::2].contiguous()
    ends = torch.cat([first, second], dim=1).sort(1).values  # (p, 2t): in between, both prefixes stay the same
    weights = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
    usable = (length[0::2] > 0) & (length[1::2] > 0)
    last = mask.shape[1] - 1
    chosen, rejected = (torch.searchsorted(text, ends).clamp(max=last) for text in (first, second))
    return PrefixPairs(chosen, rejected, weights * usable)


def preference_loss(rewards: Rewards, loss_mask: Mask, weights: Float[Tensor, " p"] | None = None) -> Loss:
    """(1/P) Σ_i Σ_s w_s Σ_a −log σ(r̂(preferred prefix) − r̂(other prefix)), the loss of Bradley and Terry.

    Rows 2i and 2i + 1 are the preferred and the other text of pair i, which is multiplied by its weight if there are
    weights. `pair_prefixes` chooses the prefixes and their weights w_s.
    """
    rewards = _zero_outside(rewards, loss_mask)
    prefixes = pair_prefixes(loss_mask)
    chosen, rejected = (
        texts.gather(1, columns[..., None].expand(-1, -1, texts.shape[-1]))
        for texts, columns in ((rewards[0::2], prefixes.chosen), (rewards[1::2], prefixes.rejected))
    )
    errors = F.softplus(rejected - chosen).sum(-1)  # (p, s)
    pairs = (errors * prefixes.weights).sum(1)  # (p,)
    return (pairs if weights is None else pairs * weights).sum() / len(pairs)


# --- distillation and regulariser ---


def distillation_loss(rewards: Rewards, loss_mask: Mask, teacher_rewards: Rewards) -> Loss:
    """Mean of (r̂_student − r̂_teacher)² over the positions in the mask and over attributes."""
    differences = _zero_outside(rewards, loss_mask) - _zero_outside(teacher_rewards, loss_mask)
    return _mean_over_positions(differences.square(), loss_mask)


def candidate_loss(rewards: Candidates, targets: Candidates, used: Bool[Tensor, "b p k"]) -> Loss:
    """Mean of (r̂_student − r̂_teacher)² over the candidates that are used and over attributes."""
    return _mean_over_candidates((at_least_float32(rewards) - at_least_float32(targets)).square(), used)


def difference_loss(rewards: Candidates, targets: Candidates, used: Bool[Tensor, "b p k"]) -> Loss:
    """Mean squared error of the differences between candidates: of rewards minus the mean of those at their place."""
    errors = subtract_mean(at_least_float32(rewards), used) - subtract_mean(at_least_float32(targets), used)
    return _mean_over_candidates(errors.square(), used)


def subtract_mean(rewards: Float[Tensor, "*p k a"], used: Bool[Tensor, "*p k"]) -> Float[Tensor, "*p k a"]:
    """Subtract the mean over the candidates of a row that are used from its rewards."""
    counted = torch.where(used[..., None], rewards, 0)
    return rewards - counted.sum(-2, keepdim=True) / used.sum(-1).clamp(min=1)[..., None, None]


def _mean_over_candidates(errors: Candidates, used: Bool[Tensor, "b p k"]) -> Loss:
    return torch.where(used[..., None], errors, 0).sum() / (used.sum() * errors.shape[-1]).clamp(min=1)


def baseline_loss(marginals: Rewards, loss_mask: Mask) -> Loss:
    """Regulariser: mean over the positions in the mask of Σ_a Δr_a(v'|x)², for one random token v' per position.

    It sums over the attributes as the losses on labels do. Distillation, which averages over them, divides by their
    number.
    """
    return _mean_over_positions(_zero_outside(marginals, loss_mask).square(), loss_mask) * marginals.shape[-1]


def _zero_outside(rewards: Rewards, loss_mask: Mask) -> Rewards:
    """Upcast rewards with 0 outside the mask, where not even a NaN may reach loss or gradient."""
    return torch.where(loss_mask[..., None].bool(), at_least_float32(rewards), 0)


def _mean_over_positions(errors: Rewards, loss_mask: Mask) -> Loss:
    return (errors * loss_mask[..., None]).sum() / (loss_mask.float().sum() * errors.shape[-1]).clamp(min=1)


# --- experts ---


def text_loss(log_probabilities: Float[Tensor, "b t"], loss_mask: Mask, weights: Weights) -> Loss:
    """Loss of the language models of DExperts: the mean of −log P over tokens, each text times its weight."""
    texts = torch.where(loss_mask.bool(), -log_probabilities, 0).sum(1)  # (b,)
    return (texts * weights).sum() / loss_mask.sum().clamp(min=1)


def gedi_loss(
    log_probabilities: Float[Tensor, "b t"],
    log_posterior: Float[Tensor, " b"],
    loss_mask: Mask,
    weights: Weights,
    gen_weight: float,
) -> Loss:
    """Loss of GeDi: the mean over texts of λ · generative + (1 − λ) · discriminative, with λ = `gen_weight`.

    For a text x of class c, the generative part is the mean of −log P(x_t | x_<t, c) over its tokens, and the
    discriminative part is −log P(c | x).
    """
    generative = torch.where(loss_mask.bool(), -log_probabilities, 0).sum(1) / loss_mask.sum(1).clamp(min=1)
    losses = gen_weight * generative + (1 - gen_weight) * -log_posterior
    return (losses * loss_mask.any(1) * weights).sum() / len(losses)


# --- objectives ---

Inputs = dict[str, Tensor]  # a batch of rows


def count_items(loss_mask: Tensor) -> Float[Tensor, "2"]:
    """Number of texts and of positions in a mask."""
    return torch.stack([loss_mask.any(1).sum(), loss_mask.sum()]).float()


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

    def loss(self, rewards: Rewards, inputs: Inputs, rows: Loss, positions: Loss) -> Loss:
        """The part of a batch in the loss of the optimizer step: its mean over rows or positions, times its share."""
        num_rows, _ = self.count_items(inputs)
        return self.row_loss(rewards, inputs) * len(inputs["weights"]) / num_rows.clamp(min=1) * rows

    def row_loss(self, rewards: Rewards, inputs: Inputs) -> Loss:
        """The sum of the losses of all rows, divided by the number of rows in the batch."""
        return LOSSES[self.config.loss](rewards, inputs["loss_mask"], inputs["labels"], inputs["weights"])

    def regulariser(self, marginals: Rewards, inputs: Inputs, positions: Loss) -> Loss:
        """The part of a batch in the regulariser of the optimizer step."""
        return baseline_loss(marginals, inputs["loss_mask"]) * positions

    def statistics(self, rewards: Rewards, inputs: Inputs) -> tuple[Tensor, Tensor]:
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
        labels, weights = np.split(labels, [-1], axis=1)
        metrics = compute_metrics(statistics, labels, self.attributes)
        if labels.shape[1]:
            loss = None if self.config.learns_tokens else self.config.loss  # which is about labels
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

    def loss(self, rewards: Rewards, inputs: Inputs, rows: Loss, positions: Loss) -> Loss:
        return distillation_loss(rewards, inputs["loss_mask"], inputs["targets"]) * positions

    def regulariser(self, marginals: Rewards, inputs: Inputs, positions: Loss) -> Loss:
        return super().regulariser(marginals, inputs, positions) / marginals.shape[-1]  # a mean, as the loss is

    def statistics(self, rewards: Rewards, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Add to the numbers of a text the squared distance to the teacher, the number of tokens, and the sums of the
        teacher's rewards and of their squares.
        """
        numbers, labels = super().statistics(rewards, inputs)
        loss_mask, targets = inputs["loss_mask"], inputs["targets"]
        distance = (rewards - targets).square().mean(-1) * loss_mask
        columns = [distance.sum(1, keepdim=True), loss_mask.sum(1, keepdim=True).float()]
        columns += [(values * loss_mask[..., None]).sum(1) for values in (targets, targets.square())]
        return torch.cat([numbers, *columns], dim=1), labels

    def example(self, data: RewardData) -> tuple[np.ndarray, np.ndarray]:
        numbers, labels = super().example(data)
        return np.pad(numbers, ((0, 0), (0, 2 + 2 * len(self.attributes))), constant_values=1), labels


class SpanObjective(Objective):
    """Labels of single tokens; a token without one has no loss. Batches are those of `SpanData`."""

    def row_loss(self, rewards: Rewards, inputs: Inputs) -> Loss:
        loss_mask = inputs["loss_mask"]
        shares = loss_mask / loss_mask.sum(1, keepdim=True).clamp(min=1)
        return LOSSES[self.config.loss](rewards, loss_mask, inputs["token_labels"], inputs["weights"], shares)

    def statistics(self, rewards: Rewards, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Take the reward of each token, and beside its label whether it has one."""
        counted = inputs["loss_mask"][..., None].float()
        return rewards.float(), torch.cat([inputs["token_labels"], counted], dim=-1)

    def metrics(self, statistics: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Compute the metrics of tokens as of texts that end with them; no metrics if no token has a label."""
        values, counted = np.moveaxis(labels, -1, 0)  # (n, t) each; padding is −100
        rewards, wanted = statistics[..., 0][counted == 1], values[counted == 1]
        if not len(wanted):
            return {}
        column = wanted[:, None]
        metrics = compute_metrics(np.stack([rewards, (rewards - wanted) ** 2], axis=1), column, self.attributes)
        del metrics["last_token_mse"]  # the same
        return metrics | constant_metrics(column, np.ones(len(wanted)), self.data.mean_labels, self.attributes, None)

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

    def row_loss(self, rewards: Rewards, inputs: Inputs) -> Loss:
        return preference_loss(rewards, inputs["loss_mask"], inputs["weights"])

    def statistics(self, rewards: Rewards, inputs: Inputs) -> tuple[Tensor, Tensor]:
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
        constant_loss = LOSSES[loss](outputs, one_token, torch.from_numpy(labels), torch.from_numpy(weights))
        metrics["constant_loss"] = float(constant_loss)
    return metrics


def _with_each(name: str, errors: np.ndarray, known: np.ndarray, attributes: list[str]) -> dict[str, float]:
    """Average the known errors, both (n, a), over all under `name` and, if there are several attributes, of each."""
    means = {name: float(errors[known].mean())} if known.any() else {}
    if len(attributes) > 1:
        each = zip(attributes, errors.T, known.T, strict=True)
        means |= {f"{name}_{attribute}": float(e[k].mean()) for attribute, e, k in each if k.any()}
    return means


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
