"""Guided decoding: candidates from the base model, a shift from the guide, a sample from their sum.

    z(v) = z_LM(v) / T + shift(v) for the candidates, −∞ elsewhere

The candidates come from the base logits alone and T divides the base logits alone, so β means the same at every T.

A ladder: `choose_candidates` and the guide make a `Proposal`, `sample` draws from it, `stream` does so for every token
of a batch, `generate` collects what streams by. Axes: b rows, k candidates, v vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq import cache
from radq.backbones import Wrappable, evaluating, max_positions, name_positions, num_logits
from radq.errors import ContextLengthError, OptionError, RewardValueError
from radq.guides import Guide
from radq.precision import log_probabilities, precise
from radq.vocabulary import find_bos, tokenise

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


@dataclass(frozen=True)
class Step:
    """One token for every running row. Row r is sample r % num_samples of prompt r // num_samples."""

    rows: Int[Tensor, " b"]
    proposal: Proposal
    choice: Int[Tensor, " b"]  # which of the candidates
    log_probabilities: Float[Tensor, " b"]  # of the tokens under the base alone: whole vocabulary, temperature 1

    @property
    def tokens(self) -> Int[Tensor, " b"]:
        return self.proposal.candidates.gather(1, self.choice[:, None]).squeeze(1)

    @property
    def shifts(self) -> Float[Tensor, " b"]:
        return self.proposal.shift.gather(1, self.choice[:, None]).squeeze(1)


@dataclass
class Generation:
    prompt: str
    text: str  # the continuation, without special tokens
    token_ids: list[int]  # the continuation, a final stop token included
    shifts: list[float]  # what the guide added to the logit of each of them
    finish_reason: str  # "stop" or "length"
    kl: float  # mean over the tokens of KL(guided ‖ base), in nats
    clipped: float  # mean over the tokens of the share of candidates with a clamped reward
    nll: float  # minus the log-probability of the text's tokens under the base, at temperature 1; no stop token

    @property
    def num_text_tokens(self) -> int:
        return len(self.token_ids) - (self.finish_reason == "stop")


def choose_candidates(
    logits: Float[Tensor, "b v"], top_k: int | None, top_p: float | None
) -> tuple[Int[Tensor, "b k"], Float[Tensor, "b k"]]:
    """Candidates and their logits, in float32 or better; −∞ fills the rows whose top-p set is smaller than others."""
    v = logits.shape[-1]
    if top_k is not None and top_k > v:
        raise OptionError(f"top_k is {top_k}, but the vocabulary has {v} tokens.", f"give at most {v}.")
    if top_p is None and top_k in (None, v):  # all of them: no need to sort
        return torch.arange(v, device=logits.device).expand_as(logits), precise(logits)
    values, candidates = logits.topk(top_k or v)  # of logits in half precision in half the time
    values = precise(values)
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


def generate(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    guide: Guide | None = None,
    top_k: int | None = 20,
    top_p: float | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 20,
    num_samples: int = 1,
    seed: int = 0,
    *,
    kl_budget: float | None = None,
    stop_token_ids: Sequence[int] | None = None,
    batch_size: int = 64,
    first_prompt: int = 0,
    progress: bool = False,
) -> list[Generation]:
    """Continue every prompt `num_samples` times; results in prompt order, samples of a prompt together.

    Args:
        lm: a causal language model of transformers, maybe inside PEFT or torch.compile; it stays as it is.
        guide: steers the base; None samples from the base by the same path.
        top_k, top_p, temperature, kl_budget: see `Steering`.
        seed: sample s of prompt p depends on (seed, p, s), not on `max_new_tokens` nor, but for rounding, on the batch.
        stop_token_ids: end a text; by default the model's end-of-text tokens.
        batch_size: rows (prompts × samples) decoded together at most; samples of a prompt may be spread over batches.
        first_prompt: number of the first prompt: a part of a list, so numbered, draws what the whole list would.
        progress: show a progress bar.
    """
    steering = Steering(top_k, top_p, temperature, kl_budget)
    stops = _stop_tokens(lm, tokenizer, stop_token_ids)
    steps = stream(
        lm, tokenizer, prompts, guide, steering, max_new_tokens, num_samples, seed, stops, batch_size, first_prompt
    )
    record = _Record(len(prompts) * num_samples, max_new_tokens, stops)
    with tqdm(total=record.tokens.size, unit="token", disable=not progress) as bar:
        for step in steps:
            bar.update(record.add(step))
    token_ids = [ids[:n].tolist() for ids, n in zip(record.tokens, record.lengths, strict=True)]
    texts = decode_texts(tokenizer, encode_prompts(lm, tokenizer, prompts, max_new_tokens), token_ids)
    return [
        record.generation(row, prompts[row // num_samples], text, ids)
        for row, (text, ids) in enumerate(zip(texts, token_ids, strict=True))
    ]


class _Record:
    """What streams by, row by row: arrays that are filled a step at a time."""

    def __init__(self, num_rows: int, max_new_tokens: int, stops: Sequence[int]):
        self.stops = list(stops)
        self.lengths = np.zeros(num_rows, dtype=np.int64)
        self.stopped = np.zeros(num_rows, dtype=bool)
        self.tokens = np.zeros((num_rows, max_new_tokens), dtype=np.int64)
        self.shifts = np.zeros((num_rows, max_new_tokens))
        self.sums = np.zeros((num_rows, 3))  # over the tokens: kl, clipped, and nll without that of a stop token

    def add(self, step: Step) -> int:
        """How many tokens are done with it; a row that stops is done with all it might have had."""
        measures = torch.stack([step.shifts, step.proposal.kl, step.proposal.clipped, -step.log_probabilities], dim=1)
        rows, tokens, numbers = step.rows.cpu().numpy(), step.tokens.cpu().numpy(), measures.double().cpu().numpy()
        places, stops = self.lengths[rows], np.isin(tokens, self.stops)
        self.tokens[rows, places] = tokens
        self.shifts[rows, places] = numbers[:, 0]
        numbers[stops, 3] = 0.0
        self.sums[rows] += numbers[:, 1:]
        self.lengths[rows] += 1
        self.stopped[rows] = stops
        return len(rows) + int((self.tokens.shape[1] - 1 - places)[stops].sum())

    def generation(self, row: int, prompt: str, text: str, token_ids: list[int]) -> Generation:
        kl, clipped, nll = self.sums[row].tolist()
        return Generation(
            prompt=prompt,
            text=text,
            token_ids=token_ids,
            shifts=self.shifts[row, : len(token_ids)].tolist(),
            finish_reason="stop" if self.stopped[row] else "length",
            kl=kl / len(token_ids),
            clipped=clipped / len(token_ids),
            nll=nll,
        )


def stream(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    guide: Guide | None = None,
    steering: Steering = DEFAULT_STEERING,
    max_new_tokens: int = 20,
    num_samples: int = 1,
    seed: int = 0,
    stop_token_ids: Sequence[int] | None = None,
    batch_size: int = 64,
    first_prompt: int = 0,
) -> Iterator[Step]:
    """What `generate` does, one `Step` at a time. Arguments are checked at the call, not at the first step."""
    for name, value in {"max_new_tokens": max_new_tokens, "num_samples": num_samples, "batch_size": batch_size}.items():
        if value < 1:
            raise OptionError(f"{name} is {value}.", "give 1 or more.")
    encoded = encode_prompts(lm, tokenizer, prompts, max_new_tokens)
    vocab_size = num_logits(lm)
    if guide is not None:
        guide.check_vocabulary(vocab_size, tokenizer, lm.config.name_or_path or type(lm).__name__)
        guide.check_length(max(map(len, encoded)) + max_new_tokens)
    if steering.top_k is not None and steering.top_k > vocab_size:
        raise OptionError(
            f"top_k is {steering.top_k}, but the vocabulary has {vocab_size} tokens.", f"give at most {vocab_size}."
        )
    stops = torch.tensor(_stop_tokens(lm, tokenizer, stop_token_ids), dtype=torch.long, device=lm.device)
    uniforms = _uniforms(seed, first_prompt, len(prompts), num_samples, max_new_tokens).to(lm.device)  # (p, s, steps)

    def steps() -> Iterator[Step]:
        by_length = sorted(range(len(encoded)), key=lambda p: len(encoded[p]))  # neighbours need little padding
        order = [p * num_samples + s for p in by_length for s in range(num_samples)]
        for batch in (order[first : first + batch_size] for first in range(0, len(order), batch_size)):
            place = {p: n for n, p in enumerate(dict.fromkeys(row // num_samples for row in batch))}
            rows = torch.tensor(batch, device=lm.device)
            with evaluating(lm):
                decoder = _Decoder(lm, guide, [encoded[p] for p in place])
                if len(batch) > len(place):  # samples share the reading of their prompt
                    decoder.select(torch.tensor([place[row // num_samples] for row in batch], device=lm.device))
                yield from _decode(decoder, steering, rows, uniforms.flatten(0, 1)[rows], stops)

    return steps()


def _decode(
    decoder: "_Decoder",
    steering: Steering,
    rows: Int[Tensor, " b"],
    uniforms: Float[Tensor, "b steps"],
    stops: Int[Tensor, " s"],
) -> Iterator[Step]:
    """Decode one batch; a row leaves it with its stop token."""
    for position in range(uniforms.shape[1]):
        proposal = propose(decoder.logits, decoder.guide, decoder.state, steering)
        greedy = steering.temperature == 0
        choice = proposal.logits.argmax(-1) if greedy else sample(proposal.logits, uniforms[:, position])
        tokens = proposal.candidates.gather(1, choice[:, None]).squeeze(1)
        yield Step(rows, proposal, choice, log_probabilities(decoder.logits, tokens))
        running = (~torch.isin(tokens, stops)).nonzero().squeeze(1)
        if len(running) == 0 or position + 1 == uniforms.shape[1]:
            return
        if len(running) < len(rows):
            decoder.select(running)
            rows, tokens, uniforms = rows[running], tokens[running], uniforms[running]
        decoder.advance(tokens)


class _Decoder:
    """A base model and a guide that read the same batch of texts."""

    @torch.no_grad()
    def __init__(self, lm: Wrappable, guide: Guide | None, prompts: list[list[int]]):
        longest = max(map(len, prompts))
        tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=lm.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=lm.device)
        self.lm, self.guide = lm, guide
        self.last_only: dict[str, Any] = {"logits_to_keep": 1} if cache.accepts(lm, "logits_to_keep") else {}
        output, self.prefix = cache.start(lm, tokens, mask, **self.last_only)
        self.logits = output.logits[:, -1]  # (b, v): of the base, for the next token
        self.state = None if guide is None else guide.start(tokens, mask)

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, " b"]) -> None:
        output, self.prefix = cache.extend(self.lm, self.prefix, tokens[:, None], **self.last_only)
        self.logits = output.logits[:, -1]
        if self.guide is not None:
            self.state = self.guide.advance(self.state, tokens)

    def select(self, rows: Int[Tensor, " r"]) -> None:
        self.prefix, self.logits = self.prefix.select(rows), self.logits[rows]
        if self.guide is not None:
            self.state = self.guide.select(self.state, rows)


def encode_prompts(
    lm: Wrappable, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: int
) -> list[list[int]]:
    """Token ids of the prompts, with the special tokens the base expects; an empty prompt is a BOS alone."""
    if isinstance(prompts, str) or not prompts:
        raise OptionError(f"prompts are {prompts!r}.", "give a list of one or more texts.")
    bos = find_bos(lm.config, tokenizer)
    encoded = [ids or [bos] for ids in tokenise(tokenizer, prompts, bos)]
    positions = max_positions(lm.config)
    for number, ids in enumerate(encoded):
        if positions is not None and len(ids) + max_new_tokens > positions:
            raise ContextLengthError(
                f"prompt {number} has {len(ids)} tokens; with {max_new_tokens} new ones they exceed the base model's "
                f"{name_positions(lm.config)}.",
                "shorten the prompt or lower max_new_tokens.",
            )
    return encoded


def decode_texts(
    tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], continuations: list[list[int]]
) -> list[str]:
    """What follows each prompt, so that prompt and text make the whole: some tokenizers lose a space at a beginning."""
    num_samples = len(continuations) // len(prompts)
    begins = [begin for begin in tokenizer.batch_decode(prompts, skip_special_tokens=True) for _ in range(num_samples)]
    rows = [prompts[row // num_samples] + tokens for row, tokens in enumerate(continuations)]
    wholes = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [
        whole[len(begin) :]
        if whole.startswith(begin)
        else tokenizer.batch_decode([tokens], skip_special_tokens=True)[0]
        for begin, whole, tokens in zip(begins, wholes, continuations, strict=True)
    ]


def _stop_tokens(lm: Wrappable, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int] | None) -> list[int]:
    if stop_token_ids is not None:
        return list(stop_token_ids)
    generation_config = getattr(lm, "generation_config", None)
    for end in (getattr(generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if end is not None:
            return list(end) if isinstance(end, Sequence) else [end]
    return []


@lru_cache(maxsize=4)  # many guides continue the same prompts
def _uniforms(seed: int, first: int, num_prompts: int, num_samples: int, steps: int) -> Float[Tensor, "p s steps"]:
    """Random numbers of each sample from a stream of its own, so that neighbours do not change a text."""

    def draw(prompt: int, sample: int) -> np.ndarray:
        key = np.array([seed % 2**64, prompt << 32 | sample], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).random(steps)

    return torch.from_numpy(
        np.array([[draw(p, s) for s in range(num_samples)] for p in range(first, first + num_prompts)])
    )


def _check_finite(candidates: Int[Tensor, "b k"], shift: Float[Tensor, "b k"]) -> None:
    finite = shift.isfinite()
    if not bool(finite.all()):
        row, column = (~finite).nonzero()[0].tolist()
        raise RewardValueError(
            f"the guide gave {shift[row, column].item()} for token {candidates[row, column].item()}.",
            "a reward model that diverged in training, or overflow in float16? Try another checkpoint or dtype.",
        )
