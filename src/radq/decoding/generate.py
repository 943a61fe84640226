"""Guided decoding of prompts: `stream` yields one `Step` per token of a batch, `generate` collects them as texts.

Axes: b rows, k candidates, v vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from radq.decoding.config import DEFAULT_STEERING, Steering, check_counts
from radq.decoding.steering import Proposal, Strengths, check_width, choose, propose
from radq.errors import ContextLengthError, OptionError
from radq.guides import Guide
from radq.models.loading import Wrappable, evaluating, max_positions, name_positions, num_logits
from radq.models.reading import Reader
from radq.models.vocabulary import Vocabulary, find_bos, tokenise
from radq.numerics import log_probabilities, pad_left


@dataclass(frozen=True)
class Step:
    """One token for every running row. Row r is sample r % num_samples of prompt r // num_samples."""

    rows: Int[Tensor, " b"]
    proposal: Proposal
    choice: Int[Tensor, " b"]  # the index of the chosen candidate
    log_probabilities: Float[Tensor, " b"]  # of the tokens under the base model: whole vocabulary, temperature 1

    @property
    def tokens(self) -> Int[Tensor, " b"]:
        return self.proposal.candidates.gather(1, self.choice[:, None]).squeeze(1)

    @property
    def shifts(self) -> Float[Tensor, " b"]:
        return self.proposal.shift.gather(1, self.choice[:, None]).squeeze(1)


@dataclass
class Generation:
    """A continuation of a prompt, and numbers about its decoding.

    >>> lm, tokenizer = radq.load("embedded")
    >>> generation = radq.generate(lm, tokenizer, ["The film was"])[0]
    >>> print(generation.prompt + generation.text)
    >>> perplexity = math.exp(generation.nll / generation.num_text_tokens)

    Attributes:
        prompt: the prompt as it was given.
        text: the continuation, without the prompt and without special tokens.
        token_ids: the tokens of the continuation; a stop token at the end is one of them.
        shifts: the number that the guide added to the logit of each of these tokens; 0 without a guide.
        finish_reason: "stop" if the text ended with a stop token, "length" if it reached `max_new_tokens`.
        kl: mean over the tokens of KL(guided ‖ base), over the candidates and in nats: how far the guide has moved the
            distributions that the tokens were drawn from.
        clipped: mean over the tokens of the share of candidates whose reward was clamped to the range of the training
            labels, from 0 to 1.
        nll: minus the log-probability of the tokens, without a stop token, under the base model alone: over the whole
            vocabulary, at temperature 1.
    """

    prompt: str
    text: str
    token_ids: list[int]
    shifts: list[float]
    finish_reason: str
    kl: float
    clipped: float
    nll: float

    @property
    def num_text_tokens(self) -> int:
        """The number of tokens, without a final stop token."""
        return len(self.token_ids) - (self.finish_reason == "stop")


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
    """Continue every prompt `num_samples` times; return the texts in the order of the prompts, samples together.

    >>> lm, tokenizer = radq.load("embedded")
    >>> guide = radq.load_guide("embedded:sentiment=35")
    >>> for generation in radq.generate(lm, tokenizer, ["The film was", "My neighbour"], guide, num_samples=2):
    ...     print(generation.prompt + generation.text)

    Args:
        lm: the base model, a causal language model of transformers, maybe inside PEFT or torch.compile; it is not
            changed.
        tokenizer: the tokenizer of the base model.
        prompts: one or more texts to continue; with an empty text the model starts from its BOS token.
        guide: steers the base model; None samples from the base model alone.
        top_k: each token is chosen among the k most likely ones of the base model; None takes the whole vocabulary.
        top_p: of these, only the smallest set that holds this probability are candidates; None keeps all.
        temperature: divides the logits of the base model and not the shift of the guide; 0 always takes the best token.
        max_new_tokens: the most tokens of a continuation.
        num_samples: the number of continuations of each prompt.
        seed: the random numbers of sample s of prompt p depend on (seed, p, s) alone: neither on `max_new_tokens` nor
            on the other prompts. The text may still depend on the batch in the rounding of half precision.
        kl_budget: the most nats per token between the guided distribution and that of the base model; the shift of each
            token is scaled down to it. None leaves it as it is.
        stop_token_ids: tokens that end a text; by default the model's end-of-text tokens.
        batch_size: the most rows (prompts × samples) that are decoded together; samples of a prompt may be spread over
            batches.
        first_prompt: the number p of the first prompt, for callers that continue a long list part by part and want the
            same texts as for the whole list.
        progress: show a progress bar on standard error, if it takes more than a second.
    """
    steering = Steering(top_k, top_p, temperature, kl_budget)
    stops = _stop_tokens(lm, tokenizer, stop_token_ids)
    steps = stream(
        lm, tokenizer, prompts, guide, steering, max_new_tokens, num_samples, seed, stops, batch_size, first_prompt
    )
    record = _Record(len(prompts) * num_samples, max_new_tokens, stops)
    with tqdm(total=record.tokens.size, unit="token", desc="generating", delay=1, disable=not progress) as bar:
        for step in steps:
            bar.update(record.add(step))
    token_ids = [ids[:n].tolist() for ids, n in zip(record.tokens, record.lengths, strict=True)]
    texts = decode_texts(tokenizer, encode_prompts(lm.config, tokenizer, prompts, max_new_tokens), token_ids)
    return [
        record.generation(row, prompts[row // num_samples], text, ids)
        for row, (text, ids) in enumerate(zip(texts, token_ids, strict=True))
    ]


class _Record:
    """Collects the tokens and numbers of all texts in arrays with one row per text, step by step."""

    def __init__(self, num_rows: int, max_new_tokens: int, stops: Sequence[int]):
        self.stops = list(stops)
        self.lengths = np.zeros(num_rows, dtype=np.int64)
        self.stopped = np.zeros(num_rows, dtype=bool)
        self.tokens = np.zeros((num_rows, max_new_tokens), dtype=np.int64)
        self.shifts = np.zeros((num_rows, max_new_tokens))
        self.sums = np.zeros((num_rows, 3))  # sums over the tokens of kl, clipped and nll; nll leaves out a stop token

    def add(self, step: Step) -> int:
        """Add a step; return its progress in tokens. A row that stops counts with all tokens it might have had."""
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
    """Decode as `generate` does, one `Step` at a time. Arguments are checked at the call, before the first step.

    >>> lm, tokenizer = radq.load("embedded")
    >>> guide = radq.load_guide("embedded:sentiment=35")
    >>> steering = radq.Steering(top_k=20, temperature=0.8)
    >>> for step in radq.stream(lm, tokenizer, ["The film was"], guide, steering, max_new_tokens=10):
    ...     print(tokenizer.decode(step.tokens), step.shifts.tolist())

    Rows come in batches: after the last step of one batch follows the first step of the next one.

    Args:
        lm, tokenizer, prompts, guide: as for `generate`.
        steering: top_k, top_p, temperature and kl_budget.
        max_new_tokens, num_samples, seed, stop_token_ids, batch_size, first_prompt: as for `generate`.
    """
    check_counts(max_new_tokens=max_new_tokens, num_samples=num_samples, batch_size=batch_size)
    encoded = encode_prompts(lm.config, tokenizer, prompts, max_new_tokens)
    vocab_size = num_logits(lm)
    if guide is not None:
        check_guide(guide, lm, tokenizer, encoded, max_new_tokens)
    check_width(steering.top_k, vocab_size)
    stops = torch.tensor(_stop_tokens(lm, tokenizer, stop_token_ids), dtype=torch.long, device=lm.device)
    uniforms = _uniforms(seed, first_prompt, len(prompts), num_samples, max_new_tokens).to(lm.device)  # (p, s, steps)

    def steps() -> Iterator[Step]:
        by_length = sorted(range(len(encoded)), key=lambda p: len(encoded[p]))  # for little padding
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
    """Decode one batch; a row leaves the batch after its stop token."""
    strengths = Strengths.repeat(steering, decoder.guide, decoder.base.last)
    for position in range(uniforms.shape[1]):
        proposal = decoder.propose(strengths)
        choice = choose(proposal, strengths, uniforms[:, position])
        tokens = proposal.candidates.gather(1, choice[:, None]).squeeze(1)
        yield Step(rows, proposal, choice, log_probabilities(decoder.base.last, tokens))
        running = (~torch.isin(tokens, stops)).nonzero().squeeze(1)
        if len(running) == 0 or position + 1 == uniforms.shape[1]:
            return
        if len(running) < len(rows):
            decoder.select(running)
            rows, tokens, uniforms = rows[running], tokens[running], uniforms[running]
            strengths = strengths.select(running)
        decoder.advance(tokens)


class _Decoder:
    """A base model and a guide that read the same batch of texts."""

    def __init__(self, lm: Wrappable, guide: Guide | None, prompts: list[list[int]]):
        input_ids, attention_mask = pad_left(prompts, device=lm.device)
        reader = Reader(lm, "logits", "base model", Vocabulary(num_logits(lm)))
        self.base = reader.read(input_ids, attention_mask)  # `base.last` holds the logits of the next token
        self.guide = guide
        self.state = None if guide is None else guide.start(input_ids, attention_mask)

    @torch.no_grad()
    def propose(self, strengths: Strengths) -> Proposal:
        proposal = propose(self.base.last, self.guide, self.state, strengths)
        self.state = proposal.state
        return proposal

    @torch.no_grad()
    def advance(self, tokens: Int[Tensor, " b"]) -> None:
        self.base = self.base.read(tokens)
        if self.guide is not None:
            self.state = self.guide.advance(self.state, tokens)

    def select(self, rows: Int[Tensor, " r"]) -> None:
        self.base = self.base.select(rows)
        if self.state is not None:
            self.state = self.state.select(rows)


def encode_prompts(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
    context: int | None = None,
) -> list[list[int]]:
    """Tokenise prompts, with the special tokens that the base model expects; an empty prompt becomes a BOS.

    Args:
        config: the base model's.
        context: the longest text that is allowed, with the new tokens; by default what the base model has room for.
    """
    if isinstance(prompts, str) or not prompts:
        raise OptionError(
            f"prompts must be a list of one or more texts, got {prompts!r}.", "put a single prompt into a list."
        )
    bos = find_bos(config, tokenizer)
    encoded = [ids or [bos] for ids in tokenise(tokenizer, prompts, bos)]
    positions, room = max_positions(config), name_positions(config)
    if context is not None:
        positions, room = context, f"context of {context} tokens"
    for number, ids in enumerate(encoded):
        if positions is not None and len(ids) + max_new_tokens > positions:
            raise ContextLengthError(
                f"prompt {number} has {len(ids)} tokens; with {max_new_tokens} new ones it exceeds the base model's "
                f"{room}.",
                "shorten the prompt or lower max_new_tokens.",
            )
    return encoded


def check_guide(
    guide: Guide, lm: Wrappable, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], max_new_tokens: int
) -> None:
    """Raise if a guide has another vocabulary than the base model, or no room for the texts."""
    guide.check_vocabulary(num_logits(lm), tokenizer, lm.config.name_or_path or type(lm).__name__)
    guide.check_length(max(map(len, prompts)) + max_new_tokens)


def decode_texts(
    tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], continuations: list[list[int]]
) -> list[str]:
    """Turn continuations into texts that can be appended to their prompts.

    Prompt and continuation are decoded together, since some tokenizers drop a space at the beginning of a text.
    """
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


@lru_cache(maxsize=4)  # a sweep continues the same prompts with many guides
def _uniforms(seed: int, first: int, num_prompts: int, num_samples: int, steps: int) -> Float[Tensor, "p s steps"]:
    """Draw the random numbers of each sample from a stream of its own, so that other samples do not change a text."""

    def draw(prompt: int, sample: int) -> np.ndarray:
        key = np.array([seed % 2**64, prompt << 32 | sample], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).random(steps)

    return torch.from_numpy(
        np.array([[draw(p, s) for s in range(num_samples)] for p in range(first, first + num_prompts)])
    )
