"""One step of guided decoding, as pure functions: candidates of the base, a guide's shift, a KL budget, a sample.

    z(v) = z_LM(v) / T + shift(v) for the candidates, −∞ elsewhere

The candidates come from the base logits alone and T divides the base logits alone, so β means the same at every T.
Axes: b rows, k candidates, v vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from radq.errors import OptionError, RewardValueError
from radq.guides import Guide
from radq.numerics import at_least_float32

KL_BISECTIONS = 30  # finds the scale of β to 1 part in 10⁹
COLDEST = 1e-5  # logits divided by less may leave the range of float32


@dataclass(frozen=True)
class Steering:
    """How base logits and a guide's shift become the logits of the next token.

    Args:
        top_k: candidates are the k most likely tokens of the base; None for the whole vocabulary.
        top_p: and within them the smallest set that holds this probability; None for no such limit.
        temperature: divides the base logits; 0 takes the best candidate of z_LM + shift instead of sampling.
        kl_budget: scale the shift of each token down until KL(guided ‖ base on the candidates) fits this many nats.
    """

    top_k: int | None = 20
    top_p: float | None = None
    temperature: float = 1.0
    kl_budget: float | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise OptionError(f"top_k is {self.top_k}.", "give 1 or more, or None for the whole vocabulary.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(f"top_p is {self.top_p}.", "give a probability above 0 and up to 1.")
        if not 0 <= self.temperature < float("inf"):
            raise OptionError(f"temperature is {self.temperature}.", "give 0 (greedy) or a positive number.")
        if self.kl_budget is not None and not self.kl_budget >= 0:
            raise OptionError(f"kl_budget is {self.kl_budget}.", "give 0 or more nats per token.")


DEFAULT_STEERING = Steering()


@dataclass(frozen=True)
class Proposal:
    """What the next token is drawn from."""

    candidates: Int[Tensor, "b k"]
    base: Float[Tensor, "b k"]  # z_LM / T; −∞ where a row has fewer than k candidates
    shift: Float[Tensor, "b k"]  # the guide's, scaled to the KL budget; −∞ where it forbids a candidate
    clipped: Float[Tensor, " b"]  # share of a row's candidates with a clamped reward

    @property
    def logits(self) -> Float[Tensor, "b k"]:
        return self.base + self.shift

    @property
    def kl(self) -> Float[Tensor, " b"]:
        return kl_divergence(self.logits, self.base)


def choose_candidates(
    logits: Float[Tensor, "b v"], top_k: int | None, top_p: float | None
) -> tuple[Int[Tensor, "b k"], Float[Tensor, "b k"]]:
    """Candidates and their logits, in float32 or better; −∞ fills the rows whose top-p set is smaller than others."""
    v = logits.shape[-1]
    if top_k is not None and top_k > v:
        raise OptionError(f"top_k is {top_k}, but the vocabulary has {v} tokens.", f"give at most {v}.")
    if top_p is None and top_k in (None, v):  # all of them: no need to sort
        return torch.arange(v, device=logits.device).expand_as(logits), at_least_float32(logits)
    values, candidates = logits.topk(top_k or v)  # of logits in half precision in half the time
    values = at_least_float32(values)
    if top_p is not None:
        probabilities = values.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= top_p  # those before it hold enough already
        outside[:, 0] = False
        widest = int((~outside).sum(-1).max())
        values = values.masked_fill(outside, -torch.inf)[:, :widest]
        candidates = candidates[:, :widest]
    return candidates, values


def propose(logits: Float[Tensor, "b v"], guide: Guide | None, state: Any, steering: Steering) -> Proposal:
    """From the base's logits for the next token to the guided logits of its candidates."""
    candidates, values = choose_candidates(logits, steering.top_k, steering.top_p)
    base = divide(values, steering.temperature)
    none = torch.zeros_like(base[:, 0])
    if guide is None:
        return Proposal(candidates, base, torch.zeros_like(base), none)
    shift = guide.shift(state, candidates).to(base.dtype)
    _check_finite(candidates, shift)
    barrier = _barrier(base, guide.allowed(state, candidates, base + shift))
    if steering.kl_budget is not None:
        barrier, scale = fit_budget(base, shift, barrier, steering.kl_budget)
        shift = shift * scale[:, None]
    shift = shift + barrier
    clipped = guide.clipped(state)
    if clipped is None:
        return Proposal(candidates, base, shift, none)
    possible = ~base.isneginf()
    share = (clipped.to(base.device) & possible).sum(-1) / possible.sum(-1)
    return Proposal(candidates, base, shift, share)


def divide(values: Float[Tensor, "b k"], temperature: float) -> Float[Tensor, "b k"]:
    """z_LM / T; z_LM itself for greedy decoding. Below `COLDEST`, where that might overflow, less the best of each row:
    the probabilities are the same.
    """
    if 0 < temperature < COLDEST:
        return (values - values.amax(-1, keepdim=True)) / max(temperature, torch.finfo(values.dtype).tiny)
    return values / (temperature or 1.0)


def _barrier(base: Float[Tensor, "b k"], allowed: Bool[Tensor, "b k"] | None) -> Float[Tensor, "b k"]:
    """−∞ for the candidates that a guide forbids, 0 elsewhere and in rows where it would leave none."""
    barrier = torch.zeros_like(base)
    if allowed is None:
        return barrier
    allowed = allowed.to(base.device)
    some_left = (allowed & ~base.isneginf()).any(-1, keepdim=True)
    return barrier.masked_fill(~allowed & some_left, -torch.inf)


def fit_budget(
    base: Float[Tensor, "b k"], shift: Float[Tensor, "b k"], barrier: Float[Tensor, "b k"], budget: float
) -> tuple[Float[Tensor, "b k"], Float[Tensor, " b"]]:
    """The barrier, without the rows where it alone would cost more than the budget, and the scale of the shift."""
    affordable = kl_divergence(base + barrier, base) <= budget
    barrier = torch.where(affordable[:, None], barrier, 0.0)
    return barrier, kl_scale(base, shift, budget, barrier)


def kl_scale(
    base: Float[Tensor, "b k"],
    shift: Float[Tensor, "b k"],
    budget: float,
    barrier: Float[Tensor, "b k"] | float = 0.0,
) -> Float[Tensor, " b"]:
    """The largest c in [0, 1] with KL(softmax(base + c·shift + barrier) ‖ softmax(base)) ≤ budget, for each row.

    The divergence grows with c, so bisection finds it; c = 1 is the full β the guide was given.
    """
    low, high = torch.zeros_like(base[:, 0]), torch.ones_like(base[:, 0])
    fits = kl_divergence(base + shift + barrier, base) <= budget
    for _ in range(KL_BISECTIONS):
        middle = (low + high) / 2
        within = kl_divergence(base + middle[:, None] * shift + barrier, base) <= budget
        low, high = torch.where(within, middle, low), torch.where(within, high, middle)
    return torch.where(fits, 1.0, low)


def kl_divergence(guided: Float[Tensor, "b k"], base: Float[Tensor, "b k"]) -> Float[Tensor, " b"]:
    log_guided, log_base = guided.double().log_softmax(-1), base.double().log_softmax(-1)  # small differences of sums
    terms = log_guided.exp() * (log_guided - log_base)
    return torch.where(base.isneginf() | guided.isneginf(), 0.0, terms).sum(-1).clamp(min=0).to(base.dtype)


def sample(logits: Float[Tensor, "b k"], uniforms: Float[Tensor, " b"]) -> Int[Tensor, " b"]:
    """The candidate at which the cumulated probability passes a number in [0, 1)."""
    cumulated = logits.double().softmax(-1).cumsum(-1)
    thresholds = uniforms.double()[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, thresholds, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


def _check_finite(candidates: Int[Tensor, "b k"], shift: Float[Tensor, "b k"]) -> None:
    finite = shift.isfinite()
    if not bool(finite.all()):
        row, column = (~finite).nonzero()[0].tolist()
        raise RewardValueError(
            f"the guide gave {shift[row, column].item()} for token {candidates[row, column].item()}.",
            "a reward model that diverged in training, or overflow in float16? Try another checkpoint or dtype.",
        )
