"""Training losses: pure functions of head outputs, masks and labels; for experts, of log-probabilities.

`loss_mask` is 1 at the tokens that the loss is about and 0 elsewhere: at prompts and at padding, which may stand on
either side. Axes: b batch, t time, a attributes, p positions or pairs, k candidates, s steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from radq.numerics import at_least_float32

Mask = Int[Tensor, "b t"] | Bool[Tensor, "b t"] | Float[Tensor, "b t"]
Labels = Float[Tensor, "b a"] | Float[Tensor, "b t a"]

# --- losses on labels ---


def squared_loss(
    rewards: Float[Tensor, "b t a"],
    loss_mask: Mask,
    labels: Labels,
    weights: Float[Tensor, " b"] | None = None,
    shares: Float[Tensor, "b t"] | None = None,
) -> Float[Tensor, ""]:
    """(1/B) Σ_i Σ_t λ_t Σ_a (r̂ − y)², where each text i is multiplied by its weight if there are weights.

    Labels are those of texts, or of each token. An attribute whose label is missing, NaN, has no error. If there are
    `shares` of the tokens of a text, they replace λ.
    """
    rewards = _zero_outside(rewards, loss_mask)
    labels, known = _expand(labels, rewards)
    return _sum_over_prefixes((rewards - labels).square() * known, loss_mask, weights, shares)


def cross_entropy_loss(
    rewards: Float[Tensor, "b t a"],
    loss_mask: Mask,
    labels: Labels,
    weights: Float[Tensor, " b"] | None = None,
    shares: Float[Tensor, "b t"] | None = None,
) -> Float[Tensor, ""]:
    """Binary cross-entropy of σ(r̂) against labels in [0, 1], summed over tokens and texts as in `squared_loss`."""
    rewards = _zero_outside(rewards, loss_mask)
    labels, known = _expand(labels, rewards)
    errors = F.binary_cross_entropy_with_logits(rewards, labels, reduction="none")
    return _sum_over_prefixes(errors * known, loss_mask, weights, shares)


def _expand(labels: Labels, rewards: Float[Tensor, "b t a"]) -> tuple[Float[Tensor, "b t a"], Bool[Tensor, "b t a"]]:
    """A label for each reward, 0 where it is missing, and whether it is known.

    Labels of texts are those of all their tokens.
    """
    labels = (labels if labels.dim() == 3 else labels[:, None]).to(rewards.dtype).expand_as(rewards)
    known = ~labels.isnan()
    return torch.where(known, labels, 0), known  # not even masked may a NaN reach the gradient


def prefix_weights(loss_mask: Mask) -> Float[Tensor, "b t"]:
    """λ_t = t / (L (L + 1) / 2) at the t-th of L tokens in the mask, 0 elsewhere: the weights of a text sum to 1."""
    loss_mask = loss_mask.float()
    length = loss_mask.sum(1, keepdim=True)  # (b, 1)
    normaliser = (length * (length + 1) / 2).clamp(min=1)  # 1 for a text without tokens, whose weights are all 0
    return loss_mask.cumsum(1) * loss_mask / normaliser


def _sum_over_prefixes(
    errors: Float[Tensor, "b t a"],
    loss_mask: Mask,
    weights: Float[Tensor, " b"] | None,
    shares: Float[Tensor, "b t"] | None,
) -> Float[Tensor, ""]:
    shares = prefix_weights(loss_mask) if shares is None else shares
    texts = (errors * shares[..., None]).sum((1, 2))  # (b,)
    return (texts if weights is None else texts * weights).sum() / len(errors)


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


def preference_loss(
    rewards: Float[Tensor, "b t a"], loss_mask: Mask, weights: Float[Tensor, " p"] | None = None
) -> Float[Tensor, ""]:
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


def distillation_loss(
    rewards: Float[Tensor, "b t a"], loss_mask: Mask, teacher_rewards: Float[Tensor, "b t a"]
) -> Float[Tensor, ""]:
    """Mean of (r̂_student − r̂_teacher)² over the positions in the mask and over attributes."""
    differences = _zero_outside(rewards, loss_mask) - _zero_outside(teacher_rewards, loss_mask)
    return _mean_over_positions(differences.square(), loss_mask)


def candidate_loss(
    rewards: Float[Tensor, "b p k a"], targets: Float[Tensor, "b p k a"], used: Bool[Tensor, "b p k"]
) -> Float[Tensor, ""]:
    """Mean of (r̂_student − r̂_teacher)² over the candidates that are used and over attributes."""
    return _mean_over_candidates((at_least_float32(rewards) - at_least_float32(targets)).square(), used)


def difference_loss(
    rewards: Float[Tensor, "b p k a"], targets: Float[Tensor, "b p k a"], used: Bool[Tensor, "b p k"]
) -> Float[Tensor, ""]:
    """Mean squared error of the differences between candidates: of rewards minus the mean of those at their place."""
    errors = subtract_mean(at_least_float32(rewards), used) - subtract_mean(at_least_float32(targets), used)
    return _mean_over_candidates(errors.square(), used)


def subtract_mean(rewards: Float[Tensor, "*p k a"], used: Bool[Tensor, "*p k"]) -> Float[Tensor, "*p k a"]:
    """Subtract the mean over the candidates of a row that are used from its rewards."""
    kept = torch.where(used[..., None], rewards, 0)
    return rewards - kept.sum(-2, keepdim=True) / used.sum(-1).clamp(min=1)[..., None, None]


def _mean_over_candidates(errors: Float[Tensor, "b p k a"], used: Bool[Tensor, "b p k"]) -> Float[Tensor, ""]:
    return torch.where(used[..., None], errors, 0).sum() / (used.sum() * errors.shape[-1]).clamp(min=1)


def baseline_loss(marginals: Float[Tensor, "b t a"], loss_mask: Mask) -> Float[Tensor, ""]:
    """Regulariser: mean over the positions in the mask of Σ_a Δr_a(v'|x)², for one random token v' per position.

    It sums over the attributes as the losses on labels do. Distillation, which averages over them, divides by their
    number.
    """
    return _mean_over_positions(_zero_outside(marginals, loss_mask).square(), loss_mask) * marginals.shape[-1]


def _zero_outside(rewards: Float[Tensor, "b t a"], loss_mask: Mask) -> Float[Tensor, "b t a"]:
    """Upcast rewards with 0 outside the mask, where not even a NaN may reach loss or gradient."""
    return torch.where(loss_mask[..., None].bool(), at_least_float32(rewards), 0)


def _mean_over_positions(errors: Float[Tensor, "b t a"], loss_mask: Mask) -> Float[Tensor, ""]:
    return (errors * loss_mask[..., None]).sum() / (loss_mask.float().sum() * errors.shape[-1]).clamp(min=1)


# --- experts ---


def text_loss(
    log_probabilities: Float[Tensor, "b t"], loss_mask: Mask, weights: Float[Tensor, " b"]
) -> Float[Tensor, ""]:
    """Loss of the language models of DExperts: the mean of −log P over tokens, each text times its weight."""
    texts = torch.where(loss_mask.bool(), -log_probabilities, 0).sum(1)  # (b,)
    return (texts * weights).sum() / loss_mask.sum().clamp(min=1)


def gedi_loss(
    log_probabilities: Float[Tensor, "b t"],
    log_posterior: Float[Tensor, " b"],
    loss_mask: Mask,
    weights: Float[Tensor, " b"],
    gen_weight: float,
) -> Float[Tensor, ""]:
    """Loss of GeDi: the mean over texts of λ · generative + (1 − λ) · discriminative, with λ = `gen_weight`.

    For a text x of class c, the generative part is the mean of −log P(x_t | x_<t, c) over its tokens, and the
    discriminative part is −log P(c | x).
    """
    generative = torch.where(loss_mask.bool(), -log_probabilities, 0).sum(1) / loss_mask.sum(1).clamp(min=1)
    losses = gen_weight * generative + (1 - gen_weight) * -log_posterior
    return (losses * loss_mask.any(1) * weights).sum() / len(losses)


class LabelLoss(NamedTuple):
    """A loss between rewards and labels, as `--loss` names it."""

    compute: Callable[..., Float[Tensor, ""]]  # of head outputs (b, t, a), loss_mask, labels (b, a) and weights (b,)
    head_output: Callable[[Tensor], Tensor]  # turns a reward into the head output that stands for it
    label_range: tuple[float, float] | None  # labels outside this range are refused; None allows all


def _same(reward: Tensor) -> Tensor:
    return reward


def _logit(reward: Tensor) -> Tensor:
    return reward.logit(eps=1e-7)  # finite also for rewards of 0 and 1


LOSSES = {
    "mse": LabelLoss(squared_loss, _same, None),
    "ce": LabelLoss(cross_entropy_loss, _logit, (0.0, 1.0)),
}
