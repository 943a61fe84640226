"""The training losses: pure functions of rewards, mask and responses; of log-probabilities for experts.

`mask` is 1 at the real tokens of an utterance and 0 at padding (on either side); L is always counted from it.
Axes: b batch, t time, a attributes.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from radq.numerics import at_least_float32

Mask = Int[Tensor, "b t"] | Bool[Tensor, "b t"] | Float[Tensor, "b t"]


def prefix_weights(mask: Mask) -> Float[Tensor, "b t"]:
    """λ_t = t / (L (L + 1) / 2) at the t-th real token, 0 at padding: every utterance's weights sum to 1."""
    mask = mask.float()
    length = mask.sum(1, keepdim=True)  # (b, 1)
    normaliser = (length * (length + 1) / 2).clamp(min=1)  # an utterance without tokens weighs nothing
    return mask.cumsum(1) * mask / normaliser


def squared_loss(
    rewards: Float[Tensor, "b t a"],
    mask: Mask,
    responses: Float[Tensor, "b a"],
    weights: Float[Tensor, " b"] | None = None,
) -> Float[Tensor, ""]:
    """(1/B) Σ_i Σ_t λ_t Σ_a (r̂ − y)², each utterance i times its weight if there are weights."""
    rewards = _real(rewards, mask)
    return _over_prefixes((rewards - responses[:, None].to(rewards.dtype)).square(), mask, weights)


def cross_entropy_loss(
    rewards: Float[Tensor, "b t a"],
    mask: Mask,
    responses: Float[Tensor, "b a"],
    weights: Float[Tensor, " b"] | None = None,
) -> Float[Tensor, ""]:
    """Binary cross-entropy of σ(r̂) against responses in [0, 1], weighted as the squared loss is."""
    rewards = _real(rewards, mask)
    targets = responses[:, None].to(rewards.dtype).expand_as(rewards)
    return _over_prefixes(F.binary_cross_entropy_with_logits(rewards, targets, reduction="none"), mask, weights)


def distillation_loss(
    rewards: Float[Tensor, "b t a"], mask: Mask, teacher_rewards: Float[Tensor, "b t a"]
) -> Float[Tensor, ""]:
    """Mean over real positions and attributes of (r̂_student − r̂_teacher)²."""
    return _over_positions((_real(rewards, mask) - _real(teacher_rewards, mask)).square(), mask)


def baseline_loss(marginals: Float[Tensor, "b t a"], mask: Mask) -> Float[Tensor, ""]:
    """Mean over real positions of Σ_a Δr_a(v'|x)², for the Δr of one random token v' per position.

    It sums over the attributes as the losses on responses do. Distillation, which averages over them, divides by their
    number.
    """
    return _over_positions(_real(marginals, mask).square(), mask) * marginals.shape[-1]


def text_loss(log_probabilities: Float[Tensor, "b t"], mask: Mask, weights: Float[Tensor, " b"]) -> Float[Tensor, ""]:
    """Of DExperts' language models: the mean of −log P over real positions, each text times its weight."""
    texts = torch.where(mask.bool(), -log_probabilities, 0).sum(1)  # (b,)
    return (texts * weights).sum() / mask.sum().clamp(min=1)


def gedi_loss(
    log_probabilities: Float[Tensor, "b t"],
    log_posterior: Float[Tensor, " b"],
    mask: Mask,
    weights: Float[Tensor, " b"],
    gen_weight: float,
) -> Float[Tensor, ""]:
    """λ · generative + (1 − λ) · discriminative, both of the class that a text belongs to; the mean over texts.

    Generative is the mean of −log P(x_t | x_<t, c) over the tokens of a text, discriminative −log P(c | x).
    """
    generative = torch.where(mask.bool(), -log_probabilities, 0).sum(1) / mask.sum(1).clamp(min=1)
    losses = gen_weight * generative + (1 - gen_weight) * -log_posterior
    return (losses * mask.any(1) * weights).sum() / len(losses)


def _real(rewards: Float[Tensor, "b t a"], mask: Mask) -> Float[Tensor, "b t a"]:
    """Rewards with 0 at padding, where not even a NaN may reach loss or gradient; float32 or better, for the sums."""
    return torch.where(mask[..., None].bool(), at_least_float32(rewards), 0)


def _over_prefixes(
    errors: Float[Tensor, "b t a"], mask: Mask, weights: Float[Tensor, " b"] | None
) -> Float[Tensor, ""]:
    utterances = (errors * prefix_weights(mask)[..., None]).sum((1, 2))  # (b,)
    return (utterances if weights is None else utterances * weights).sum() / len(errors)


def _over_positions(errors: Float[Tensor, "b t a"], mask: Mask) -> Float[Tensor, ""]:
    return (errors * mask[..., None]).sum() / (mask.float().sum() * errors.shape[-1]).clamp(min=1)


LOSSES = {"mse": squared_loss, "ce": cross_entropy_loss}
