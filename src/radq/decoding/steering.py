"""One step of guided decoding, as pure functions: choose candidates, add a guide's shift, fit a KL budget, sample.

    z(v) = z_LM(v) / T + shift(v) for the candidates v, −∞ elsewhere

A guide decides what is said, not when it ends: stop tokens keep the probability that the base model gives them.
The base model's logits z_LM alone decide on the candidates. The temperature T divides z_LM and not the shift, so that β
has the same effect on z at every T.
Axes: b rows, k candidates, v vocabulary, e stop tokens.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from radq.decoding.config import Steering
from radq.errors import OptionError, RewardValueError
from radq.guides.base import Adviser, Guide, State
from radq.numerics import Candidates, Strengths, Tokens, at_least_float32, constant

OCTAVES = 32  # below 1, in which the scale of a shift is looked for; a smaller one is 0
OCTAVE_PARTS = 2**19  # to which the scale is found: to 1 part in 10⁶
MOST_SECTIONS, SECTION_NUMBERS = 64, 4096  # sections computed at once: fewer where there are many candidates
COLDEST = 1e-5  # logits divided by less may leave the range of float32


@dataclass(frozen=True)
class Plan:
    """The computations that a step must make for some row of a batch; more than a row needs does not change its result.

    A plan is made before the step, on the host, so that the step never waits for a device.
    """

    widest: int | None  # the largest top_k of any row; None if a row takes the whole vocabulary
    same_width: bool  # whether all rows have this top_k
    limited: bool  # by top_p, in some row
    tempered: bool  # whether some row has a temperature other than 0 and 1
    greedy: bool  # whether some row takes the best candidate
    sampled: bool  # whether some row draws one
    budgeted: bool  # by KL, in some row
    holds_ends: bool  # whether some row leaves the probability of stop tokens to the base model

    @classmethod
    def of(cls, steerings: Iterable[Steering]) -> "Plan":
        found = set(steerings)
        widths = {steering.top_k for steering in found}
        return cls(
            widest=None if None in widths else max((width for width in widths if width is not None), default=1),
            same_width=len(widths) == 1,
            limited=any(steering.top_p is not None for steering in found),
            tempered=any(steering.temperature not in (0, 1) for steering in found),
            greedy=any(steering.temperature == 0 for steering in found),
            sampled=any(steering.temperature != 0 for steering in found),
            budgeted=any(steering.kl_budget is not None for steering in found),
            holds_ends=any(steering.ends == "base" for steering in found),
        )


@dataclass(frozen=True)
class RowSettings:
    """The settings and strengths β of a batch, one row for each request."""

    plan: Plan
    beta: Strengths  # the strengths of the guide
    top_k: Tokens  # the size of the vocabulary where there is no limit
    top_p: Float[Tensor, " b"]  # infinite where there is no limit
    temperature: Float[Tensor, " b"]
    kl_budget: Float[Tensor, " b"]  # infinite where there is no budget
    stops: Int[Tensor, "b e"]  # tokens whose probability is left to the base model, filled with −1

    @classmethod
    def stack(
        cls,
        steerings: Sequence[Steering],
        beta: Sequence[Sequence[float]],
        vocab_size: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float64,
        stops: Sequence[Collection[int]] | None = None,
    ) -> "RowSettings":
        """Make the rows from the steering, the β and the stop tokens of each request; β has the given data type."""

        def column(values: Iterable[float | None], default: float) -> Tensor:
            numbers = [default if value is None else value for value in values]
            return torch.tensor(numbers, dtype=torch.float64, device=device)

        ends = [()] * len(steerings) if stops is None else stops
        held = [sorted(own) if steering.ends == "base" else [] for steering, own in zip(steerings, ends, strict=True)]
        widest = max(map(len, held), default=0)
        filled = [own + [-1] * (widest - len(own)) for own in held]
        return cls(
            plan=Plan.of(steerings),
            beta=torch.tensor(beta, dtype=dtype, device=device).view(len(steerings), -1),
            top_k=column((steering.top_k for steering in steerings), vocab_size).long(),
            top_p=column((steering.top_p for steering in steerings), torch.inf),
            temperature=column((steering.temperature for steering in steerings), 1.0),
            kl_budget=column((steering.kl_budget for steering in steerings), torch.inf),
            stops=torch.tensor(filled, dtype=torch.long, device=device).view(len(steerings), -1 if widest else 0),
        )

    @classmethod
    def repeat(
        cls, steering: Steering, guide: Guide | None, logits: Float[Tensor, "b v"], stops: Collection[int] = ()
    ) -> "RowSettings":
        """Give every row of a batch of logits the same steering and stop tokens, and the guide's own β."""
        n, v = logits.shape
        beta = () if guide is None else guide.beta
        return cls.stack([steering] * n, [beta] * n, v, logits.device, stops=[stops] * n)

    def map(self, change: Callable[[Tensor], Tensor], plan: Plan | None = None) -> "RowSettings":
        """Return the same settings with changed tensors, such as the first rows of all of them."""
        return RowSettings(plan or self.plan, *map(change, self.columns.values()))

    @property
    def columns(self) -> dict[str, Tensor]:
        """The tensors with one row for each request, by their names."""
        return {column.name: getattr(self, column.name) for column in fields(self) if column.name != "plan"}


@dataclass(frozen=True)
class Proposal:
    """The distribution that the next token is drawn from."""

    candidates: Candidates
    base: Float[Tensor, "b k"]  # z_LM / T; −∞ where a row has fewer than k candidates
    shift: Float[Tensor, "b k"]  # of the guide, scaled to the KL budget; −∞ for a candidate that the guide forbids
    clipped: Float[Tensor, " b"]  # share of a row's candidates with a clamped reward
    finite: Bool[Tensor, " b"]  # False in rows for which the guide gave no numbers; they are not steered
    state: State | None = None  # the guide's state to go on from
    rewards: tuple[Tensor, ...] | None = None  # as in `Advice`
    steered: bool = True  # whether there is a guide

    @cached_property
    def logits(self) -> Float[Tensor, "b k"]:
        return self.base + self.shift

    @cached_property
    def _log_probabilities(self) -> Float[Tensor, "n b k"]:
        """Compute those with the guide and, behind them, those without it: two softmaxes in one operation."""
        logits = torch.stack([self.logits, self.base]) if self.steered else self.logits[None]
        return logits.double().log_softmax(-1)

    @property
    def log_probabilities(self) -> Float[Tensor, "b k"]:
        """The log-probabilities of all candidates, in float64."""
        return self._log_probabilities[0]

    @cached_property
    def probabilities(self) -> Float[Tensor, "b k"]:
        return self.log_probabilities.exp()

    @property
    def kl(self) -> Float[Tensor, " b"]:
        log_base = self._log_probabilities[-1]
        return _divergence(self.probabilities, self.log_probabilities, log_base).clamp(min=0).to(self.base.dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Proposal":
        """Return the same proposal with changed tensors, such as some of their rows, and without a state."""
        parts = (self.candidates, self.base, self.shift, self.clipped, self.finite)
        rewards = None if self.rewards is None else tuple(map(change, self.rewards))
        return Proposal(*map(change, parts), state=None, rewards=rewards, steered=self.steered)

    def require_finite(self) -> "Proposal":
        """Raise if the guide gave no numbers for some row. This waits for the device."""
        if not bool(self.finite.all()):
            raise not_finite()
        return self


def choose_candidates(logits: Float[Tensor, "b v"], settings: RowSettings) -> tuple[Candidates, Float[Tensor, "b k"]]:
    """Choose candidates; return them and their logits, in float32 or better, or −∞ where a row has fewer."""
    v, plan = logits.shape[-1], settings.plan
    check_width(plan.widest, v)
    if not plan.limited and plan.same_width and plan.widest in (None, v):
        return _all_tokens(logits), at_least_float32(logits)  # no need to sort
    values, candidates = logits.topk(plan.widest or v)  # before upcasting, since half precision takes half the time
    if plan.widest in (None, v):  # a row of the whole vocabulary draws the same token whatever the other rows are
        unlimited = ((settings.top_k == v) & settings.top_p.isinf())[:, None]
        candidates = torch.where(unlimited, _all_tokens(logits), candidates)
        values = torch.where(unlimited, logits, values)
    values = at_least_float32(values)
    if not plan.limited and plan.same_width:
        return candidates, values
    outside = torch.arange(values.shape[1], device=values.device) >= settings.top_k[:, None]
    if plan.limited:
        probabilities = values.masked_fill(outside, -torch.inf).softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # the probability of all likelier candidates
        outside = outside | (before >= settings.top_p[:, None])
        outside[:, 0] = False
    return candidates, values.masked_fill(outside, -torch.inf)


def _all_tokens(logits: Float[Tensor, "b v"]) -> Int[Tensor, "b v"]:
    return torch.arange(logits.shape[1], device=logits.device).expand_as(logits)


def check_width(top_k: int | None, vocab_size: int) -> None:
    if top_k is not None and top_k > vocab_size:
        raise OptionError(
            f"top_k must be at most {vocab_size}, the number of tokens, got {top_k}.", "give a smaller top_k."
        )


def propose(
    logits: Float[Tensor, "b v"], guide: Adviser | None, state: State | None, settings: RowSettings
) -> Proposal:
    """Compute the guided logits of the candidates from the base model's logits, and the guide's state to go on from."""
    candidates, values = choose_candidates(logits, settings)
    base = divide(values, settings)
    if guide is None:
        none, fine = torch.zeros_like(base[:, 0]), torch.ones_like(base[:, 0], dtype=torch.bool)
        return Proposal(candidates, base, torch.zeros_like(base), none, fine, steered=False)
    advice = guide.advise(state, candidates, settings.beta)
    finite = torch.linalg.vector_norm(advice.shift, torch.inf, dim=-1) < torch.inf  # fewer kernels than isfinite has
    shift = torch.where(finite[:, None], advice.shift.to(base.dtype), constant((0.0,), base.dtype, base.device))
    stops = _find_stops(candidates, settings)
    words = base if stops is None else base.masked_fill(stops, -torch.inf)
    barrier = None if advice.allowed is None else _barrier(words, advice.allowed(words + shift))
    if settings.plan.budgeted:
        budget = settings.kl_budget
        if stops is not None:  # KL(guided ‖ base) is the base model's probability of a word times that of the words
            budget = budget / (words.double().logsumexp(-1) - base.double().logsumexp(-1)).exp()
        if barrier is not None:  # rows where it alone exceeds the budget have none
            affordable = kl_divergence(words + barrier, words) <= budget
            barrier = torch.where(affordable[:, None], barrier, 0.0)
        shift = shift * kl_scale(words, shift, budget, barrier)[:, None]
    shift = shift if barrier is None else shift + barrier
    shift = shift if stops is None else hold_ends(words, shift, stops)
    clipped = _share(advice.clipped, base, settings.plan)
    return Proposal(candidates, base, shift, clipped, finite, advice.state, advice.rewards)


def _find_stops(candidates: Candidates, settings: RowSettings) -> Bool[Tensor, "b k"] | None:
    """Find the candidates whose probability is left to the base model; None if no row has such stop tokens."""
    if not settings.plan.holds_ends or not settings.stops.shape[1]:
        return None
    return (candidates[:, :, None] == settings.stops[:, None]).any(-1)


def hold_ends(
    words: Float[Tensor, "b k"], shift: Float[Tensor, "b k"], stops: Bool[Tensor, "b k"]
) -> Float[Tensor, "b k"]:
    """Give stop tokens the shift log Σ_w p(w | not stop)·e^shift(w); `words` are the base logits with −∞ for stops."""
    common = (words + shift).logsumexp(-1, keepdim=True) - words.logsumexp(-1, keepdim=True)
    return torch.where(stops, common.nan_to_num(nan=0.0), shift)  # where there are only stops, nothing shifts them


def _share(clipped: Bool[Tensor, "b k"] | None, base: Float[Tensor, "b k"], plan: Plan) -> Float[Tensor, " b"]:
    """Compute the share of each row's candidates that were clipped; 0 if the guide never clamps."""
    if clipped is None:
        return torch.zeros_like(base[:, 0])
    clipped = clipped.to(base.device)
    if plan.same_width and not plan.limited:
        return clipped.to(base.dtype).mean(-1)
    possible = ~base.isneginf()
    return ((clipped & possible).sum(-1) / possible.sum(-1)).to(base.dtype)


def divide(values: Float[Tensor, "b k"], settings: RowSettings) -> Float[Tensor, "b k"]:
    """Divide logits by the temperature of their row; greedy rows, with temperature 0, stay as they are.

    Below `COLDEST` the quotients might overflow. The largest logit of the row is then subtracted first, which does
    not change the probabilities.
    """
    if not settings.plan.tempered:
        return values
    t = torch.where(settings.temperature == 0, 1.0, settings.temperature).to(values.dtype)[:, None]
    t = t.clamp(min=torch.finfo(values.dtype).tiny)
    lowered = torch.where(t < COLDEST, values - values.amax(-1, keepdim=True), values)
    return lowered / t


def _barrier(base: Float[Tensor, "b k"], allowed: Bool[Tensor, "b k"]) -> Float[Tensor, "b k"]:
    """A shift of −∞ for candidates that a guide forbids, 0 for others and in rows where it forbids all candidates."""
    allowed = allowed.to(base.device)
    some_left = (allowed & ~base.isneginf()).any(-1, keepdim=True)
    return torch.zeros_like(base).masked_fill(~allowed & some_left, -torch.inf)


def kl_scale(
    base: Float[Tensor, "b k"],
    shift: Float[Tensor, "b k"],
    budget: Float[Tensor, " b"],
    barrier: Float[Tensor, "b k"] | None = None,
) -> Float[Tensor, " b"]:
    """The largest c in [0, 1] with KL(softmax(base + c·shift + barrier) ‖ softmax(base)) ≤ budget, for each row.

    The divergence grows with c, so the place of log c among evenly spaced numbers is found again and again, each time
    in the section that the last time has left. All sections of a round are computed at once.
    """
    log_base = base.double().log_softmax(-1)[:, None]  # (b, 1, k)
    around = log_base if barrier is None else log_base + barrier[:, None]
    shifts, budgets = shift.double()[:, None], budget[:, None]
    sections = 2 ** int(math.log2(max(2, min(MOST_SECTIONS, SECTION_NUMBERS // base.shape[1]))))
    low, size = torch.full_like(log_base[..., 0], -OCTAVES), float(OCTAVES)  # of log₂ c, (b, 1)
    for _ in range(math.ceil(math.log(OCTAVES * OCTAVE_PARTS, sections))):
        size /= sections
        scales = torch.exp2(low + _ends(sections, size, base.device))  # (b, c)
        log_guided = torch.addcmul(around, scales[..., None], shifts).log_softmax(-1)
        within = _divergence(log_guided.exp(), log_guided, log_base) <= budgets
        low = low.add(within.sum(1, keepdim=True), alpha=size)
    scale = torch.exp2(low).clamp(max=1.0)  # where c = 1 fits, larger ones may fit, too
    return torch.where(low > -OCTAVES, scale, 0.0)[:, 0].to(base.dtype)


@cache
def _ends(sections: int, size: float, device: torch.device) -> Float[Tensor, " c"]:
    """The upper ends of sections of a size; they are made once, as `constant` is."""
    return torch.arange(1, sections + 1, dtype=torch.float64, device=device) * size


def kl_divergence(guided: Float[Tensor, "*#b k"], base: Float[Tensor, "*#b k"]) -> Float[Tensor, "*b"]:
    """KL(softmax(guided) ‖ softmax(base)) of each row, in nats."""
    log_guided, log_base = guided.double().log_softmax(-1), base.double().log_softmax(-1)
    return _divergence(log_guided.exp(), log_guided, log_base).clamp(min=0).to(base.dtype)


def _divergence(
    guided: Float[Tensor, "*b k"], log_guided: Float[Tensor, "*b k"], log_base: Float[Tensor, "*#b k"]
) -> Float[Tensor, "*b"]:
    """Sum up p (log p − log q), in float64, since the terms nearly cancel; where p is 0, a term is no number.

    Rounding may make a divergence of 0 slightly negative.
    """
    return (guided * (log_guided - log_base)).nansum(-1)


def choose(proposal: Proposal, settings: RowSettings, uniforms: Float[Tensor, " b"]) -> Tokens:
    """Choose a candidate for each row: the best one in greedy rows, else a sample that a number in [0, 1) decides."""
    plan = settings.plan
    if not plan.greedy:
        return sample(proposal.probabilities, uniforms)
    best = proposal.logits.argmax(-1)
    if not plan.sampled:
        return best
    return torch.where(settings.temperature == 0, best, sample(proposal.probabilities, uniforms))


def sample(probabilities: Float[Tensor, "b k"], uniforms: Float[Tensor, " b"]) -> Tokens:
    """Draw a candidate for each row: the first at which the cumulated probability exceeds a number in [0, 1)."""
    cumulated = probabilities.cumsum(-1)
    thresholds = uniforms.double()[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, thresholds, right=True).squeeze(1).clamp(max=cumulated.shape[1] - 1)


def not_finite() -> RewardValueError:
    return RewardValueError(
        "a guide's shift must be finite, and it is not.",
        "the reward model may have diverged in training, or overflows in float16: try another checkpoint or dtype.",
    )
