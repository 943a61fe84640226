"""Guided decoding of prompts: `stream` yields one `Step` per token of a batch, `generate` collects them as texts.

Axes: b rows, k candidates, v vocabulary.
"""

import asyncio
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.decoding.config import (
    DEFAULT_KL_BUDGET,
    DEFAULT_STEERING,
    NO_CHANGES,
    Ends,
    LogitChanges,
    Steering,
    check_counts,
    check_stop,
)
from radq.decoding.decoder import NUMBERS
from radq.decoding.engine import Engine, keep_engine, take_engine
from radq.decoding.processors import GrammarMask, compile_grammar, make_processors
from radq.decoding.request import Processor, Request, Ticket
from radq.decoding.steering import Proposal, check_width, not_finite
from radq.decoding.text import UNFINISHED, GrowingText, Prompt, decode_texts, encode_prompts, find_stops
from radq.errors import OptionError
from radq.guides.base import Guide
from radq.models.loading import Wrappable, num_logits
from radq.numerics import Tokens, collecting_later
from radq.settings import renamed


@dataclass(frozen=True)
class Step:
    """One token for every running row. Row r is sample r % samples of prompt r // samples."""

    rows: Tokens
    proposal: Proposal
    choice: Tokens  # the index of the chosen candidate
    log_probabilities: Float[Tensor, " b"]  # of the tokens under the base model: whole vocabulary, temperature 1

    @property
    def tokens(self) -> Tokens:
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
        text: the continuation, without the prompt and without special tokens. Characters are whole: one that the token
            ids of a prompt have begun is the first of the text, and one that is cut at the end is left out.
        token_ids: the tokens of the continuation; a stop token at the end is one of them.
        shifts: the number that the guide added to the logit of each of these tokens; 0 without a guide.
        finish_reason: "stop" if the text ended with a stop token or at a stop text, "length" if it reached
            `max_new_tokens`, "error" if the guide gave no numbers for it.
        kl: mean over the tokens of KL(guided ‖ base), over the candidates and in nats: how far the guide has moved the
            distributions that the tokens were drawn from.
        clipped: mean over the tokens of the share of candidates whose reward was clamped to the range of the training
            labels, from 0 to 1.
        nll: minus the log-probability of the tokens, without a stop token, under the base model alone: over the whole
            vocabulary, at temperature 1.
        drawn_nll: minus the log-probability of the same tokens in the distributions that they were drawn from, which
            candidates, temperature and guide have shaped; 0 at temperature 0. For the best of n it is that of the
            sample, lowered by the divergence of keeping it. `nll` minus `drawn_nll`, averaged over texts, is the
            divergence of the guided texts from those of the base model.
        num_text_tokens: the number of tokens, without a final stop token.
        kl_budget: the KL budget of each token; None if there was none, or no guide.
    """

    prompt: str
    text: str
    token_ids: list[int]
    shifts: list[float]
    finish_reason: str
    kl: float
    clipped: float
    nll: float
    drawn_nll: float
    num_text_tokens: int
    kl_budget: float | None = None


@renamed(num_samples="samples")
def generate(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    guide: Guide | None = None,
    top_k: int | None = 20,
    top_p: float | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 20,
    samples: int = 1,
    seed: int = 0,
    *,
    beta: Sequence[float] | None = None,
    kl_budget: float | None = DEFAULT_KL_BUDGET,
    ends: Ends = "base",
    stop_token_ids: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    batch_size: int | None = None,
    changes: LogitChanges = NO_CHANGES,
    logits_processors: Sequence[Processor] = (),
    compile: bool = False,
    first_prompt: int = 0,
    progress: bool = False,
) -> list[Generation]:
    """Continue every prompt `samples` times; return the texts in the order of the prompts, samples together.

    >>> lm, tokenizer = radq.load("embedded")
    >>> guide = radq.load_guide("embedded:sentiment=45")
    >>> for generation in radq.generate(lm, tokenizer, ["The film was", "My neighbour"], guide, samples=2):
    ...     print(generation.prompt + generation.text)

    Args:
        lm: the base model, a causal language model of transformers, maybe inside PEFT or torch.compile; it is not
            changed.
        tokenizer: the tokenizer of the base model.
        prompts: one or more texts to continue; with an empty text the model starts from its BOS token. A prompt may
            also be a list of token ids, or a list of chat messages, {"role": …, "content": …}, which the tokenizer's
            chat template turns into a text. Names of special tokens in messages are text like any other.
        guide: steers the base model; None samples from the base model alone.
        top_k, top_p, temperature, kl_budget, ends: as in `Steering`. Each result has the KL budget that was taken.
        max_new_tokens: the most tokens of a continuation.
        samples: the number of continuations of each prompt.
        seed: the random numbers of sample s of prompt p depend on (seed, p, s) alone: neither on `max_new_tokens` nor
            on the other prompts. The text may still depend on the batch in the rounding of half precision.
        beta: the strengths of the guide, in place of its own and in their order. On a GPU, calls that differ in their
            strengths alone use the same captured steps.
        stop_token_ids: tokens that end a text; by default the model's end-of-text tokens.
        stop: texts that end a continuation before them.
        batch_size: the most rows (prompts × samples) that are decoded together; by default as many as fit into free
            memory.
        changes: penalties, biases, min_p, a least number of tokens, and a JSON schema. They change the base model's
            logits before candidates are chosen; `nll` stays that of the base model itself.
        logits_processors: logits processors of transformers, which do the same after them.
        compile: compile the models with torch.compile, which takes a minute or so at the first call with as many texts
            and tokens. Small models on a GPU then decode up to twice as fast.
        first_prompt: the number p of the first prompt, for callers that continue a long list part by part and want the
            same texts as for the whole list.
        progress: show a progress bar on standard error, if it takes more than a second.
    """
    steering = Steering(top_k, top_p, temperature, kl_budget, ends)
    rows = samples, seed, stop_token_ids, batch_size, first_prompt
    engine, tickets = _submit(
        *(lm, tokenizer, prompts, guide, steering, max_new_tokens, *rows),
        beta=beta,
        stop=stop,
        changes=changes,
        processors=tuple(logits_processors),
        compile=compile,
    )
    total = len(tickets) * max_new_tokens
    with tqdm(total=total, unit="token", desc="generating", delay=1, disable=not progress) as bar:
        for step in engine.run():
            bar.update(min(len(step.tickets), total - bar.n))
    keep_engine(engine)
    warn_of_errors(tickets)
    encoded = [list(ticket.request.prompt) for ticket in tickets[::samples]]
    texts = decode_texts(tokenizer, encoded, [ticket.text_tokens for ticket in tickets])
    pairs = zip(prompts, encoded, strict=True)
    shown = [
        prompt if isinstance(prompt, str) else str(tokenizer.decode(ids)).rstrip(UNFINISHED) for prompt, ids in pairs
    ]
    return [
        _make_generation(ticket, shown[row // samples], text, None if guide is None else kl_budget)
        for row, (ticket, text) in enumerate(zip(tickets, texts, strict=True))
    ]


def warn_of_errors(tickets: Sequence[Ticket]) -> None:
    """Warn of texts for which the guide gave no numbers; raise if all are, or if one failed for another reason."""
    for ticket in tickets:
        if ticket.error is not None:
            raise ticket.error
    failed = sum(ticket.finish_reason == "error" for ticket in tickets)
    if failed == len(tickets):
        raise not_finite()
    if failed:
        warnings.warn(
            f"{failed} of {len(tickets)} texts end early with the finish_reason 'error': {not_finite()}", stacklevel=3
        )


def _make_generation(ticket: Ticket, prompt: str, text: str, budget: float | None) -> Generation:
    numbers = np.array(ticket.rows)[:, : len(NUMBERS)] if ticket.rows else np.zeros((0, len(NUMBERS)))
    watch, counted = ticket.request.watch, max(1, len(numbers))
    of_text = numbers[: len(ticket.text_tokens)]
    greedy = ticket.request.steering.temperature == 0  # the best token is certain
    return Generation(
        prompt=prompt,
        text=watch.text if isinstance(watch, GrowingText) and watch.stopped else text,  # up to a stop text
        token_ids=ticket.tokens,
        shifts=numbers[:, 1].tolist(),
        finish_reason=ticket.finish_reason or "",
        kl=float(numbers[:, 2].sum()) / counted,
        clipped=float(numbers[:, 3].sum()) / counted,
        nll=-float(of_text[:, 4].sum()),
        drawn_nll=0.0 if greedy else -float(of_text[:, 5].sum()),
        num_text_tokens=len(of_text),
        kl_budget=budget,
    )


@renamed(num_samples="samples")
def stream(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    guide: Guide | None = None,
    steering: Steering = DEFAULT_STEERING,
    max_new_tokens: int = 20,
    samples: int = 1,
    seed: int = 0,
    stop_token_ids: Sequence[int] | None = None,
    batch_size: int | None = None,
    first_prompt: int = 0,
) -> Iterator[Step]:
    """Decode as `generate` does, one `Step` at a time. Arguments are checked at the call, before the first step.

    >>> lm, tokenizer = radq.load("embedded")
    >>> guide = radq.load_guide("embedded:sentiment=45")
    >>> steering = radq.Steering(top_k=20, temperature=0.8)
    >>> for step in radq.stream(lm, tokenizer, ["The film was"], guide, steering, max_new_tokens=10):
    ...     print(tokenizer.decode(step.tokens), step.shifts.tolist())

    At most `batch_size` rows run together. When one has ended, another may begin.

    Args:
        lm, tokenizer, prompts, guide: as for `generate`.
        steering: top_k, top_p, temperature, kl_budget and ends.
        max_new_tokens, samples, seed, stop_token_ids, batch_size, first_prompt: as for `generate`.
    """
    rows = samples, seed, stop_token_ids, batch_size, first_prompt
    engine, tickets = _submit(lm, tokenizer, prompts, guide, steering, max_new_tokens, *rows, details=True)
    number_of = {ticket: row for row, ticket in enumerate(tickets)}

    def steps() -> Iterator[Step]:
        for result in engine.run():
            assert result.drawn is not None
            rows = torch.tensor([number_of[ticket] for ticket in result.tickets], device=lm.device)
            yield Step(rows, result.drawn.proposal, result.drawn.choice, result.drawn.numbers[:, 4])
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error

    return steps()


def _submit(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    guide: Guide | None,
    steering: Steering,
    max_new_tokens: int,
    samples: int,
    seed: int,
    stop_token_ids: Sequence[int] | None,
    batch_size: int | None,
    first_prompt: int,
    beta: Sequence[float] | None = None,
    stop: Sequence[str] = (),
    details: bool = False,
    changes: LogitChanges = NO_CHANGES,
    processors: tuple[Processor, ...] = (),
    compile: bool = False,
) -> tuple[Engine, list[Ticket]]:
    """Check the arguments, and submit all texts to a new engine; the tickets are in the order of the prompts."""
    encoded = encode_prompts(lm.config, tokenizer, prompts, max_new_tokens)
    check_stop(stop)
    check_counts(max_new_tokens=max_new_tokens, samples=samples, batch_size=1 if batch_size is None else batch_size)
    if guide is not None:
        check_guide(guide, lm, tokenizer, encoded, max_new_tokens)
    strengths = None if beta is None else check_strengths(beta, guide)
    check_width(steering.top_k, num_logits(lm))
    changes.check_tokens(num_logits(lm))
    schema = changes.json_schema
    grammar = None if schema is None else compile_grammar(tokenizer, num_logits(lm), schema)
    uniforms = draw_uniforms(seed, first_prompt, len(encoded), samples, max_new_tokens)  # (p, s, steps)
    engine = Engine(lm, guide, batch_size) if details else take_engine(lm, guide, batch_size, compile)
    tickets: dict[int, Ticket] = {}
    ends = frozenset(find_stops(lm, tokenizer, stop_token_ids))
    with collecting_later():  # thousands of requests would have all objects of the process looked at again and again
        for p in sorted(range(len(encoded)), key=lambda p: len(encoded[p])):  # for little padding
            length = len(encoded[p])
            own = (*make_processors(changes, length, ends), *processors)
            for s in range(samples):
                watch = GrowingText(tokenizer, encoded[p], stop, changes.min_new_tokens) if stop else None
                masks = () if grammar is None else (GrammarMask(grammar, length, ends),)
                numbers, processing = (uniforms[p, s], strengths), (*masks, *own)
                request = Request(
                    encoded[p], steering, max_new_tokens, *numbers, ends, watch, processing, details=details
                )
                tickets[p * samples + s] = engine.submit(request)
    return engine, [tickets[row] for row in range(len(tickets))]


def stream_text(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    guide: Guide | None = None,
    steering: Steering = DEFAULT_STEERING,
    max_new_tokens: int = 20,
    seed: int = 0,
    *,
    stop_token_ids: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    changes: LogitChanges = NO_CHANGES,
    logits_processors: Sequence[Processor] = (),
    compile: bool = False,
    first_prompt: int = 0,
) -> Iterator[str]:
    """Continue a prompt, and yield its text piece by piece, as it is written.

    >>> lm, tokenizer = radq.load("embedded")
    >>> guide = radq.load_guide("embedded:sentiment=45")
    >>> for piece in radq.stream_text(lm, tokenizer, "The film was", guide, stop=["."]):
    ...     print(piece, end="")

    The pieces together are the text that `generate` returns. Arguments are those of `generate` and `stream`, and are
    checked at the call.
    """
    rows = 1, seed, stop_token_ids, None, first_prompt
    engine, (ticket,) = _submit(
        *(lm, tokenizer, [prompt], guide, steering, max_new_tokens, *rows),
        stop=stop,
        changes=changes,
        processors=tuple(logits_processors),
        compile=compile,
    )
    text = GrowingText(tokenizer, ticket.request.prompt, stop, changes.min_new_tokens)

    def pieces() -> Iterator[str]:
        for token in ticket:
            if token.id not in ticket.request.stops and (piece := text.add(token.id)):
                yield piece
        if piece := text.end():
            yield piece
        keep_engine(engine)

    return pieces()


async def astream_text(*arguments: Any, **options: Any) -> AsyncIterator[str]:
    """Yield the pieces of `stream_text`, which takes the same arguments, while other tasks of the event loop go on."""
    pieces = stream_text(*arguments, **options)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def check_guide(
    guide: Guide, lm: Wrappable, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], max_new_tokens: int
) -> None:
    """Raise if a guide has another vocabulary than the base model, no room for the texts, or needs another model."""
    guide.check_base(lm)
    guide.check_vocabulary(num_logits(lm), tokenizer, lm.config.name_or_path or type(lm).__name__)
    guide.check_length(max(map(len, prompts)) + max_new_tokens)


def check_strengths(beta: Sequence[float], guide: Guide | None) -> tuple[float, ...]:
    """Return the strengths, or raise if there is no guide, or one that takes another number of them."""
    number = 0 if guide is None else len(guide.beta)
    if guide is None or len(beta) != number or not np.isfinite(beta).all():
        raise OptionError(
            f"beta is {list(beta)}, but " + ("there is no guide." if guide is None else f"the guide takes {number}."),
            "give one finite number for each strength of the guide, or none.",
        )
    return tuple(map(float, beta))


@lru_cache(maxsize=4)  # a sweep continues the same prompts with many guides
def draw_uniforms(seed: int, first: int, num_prompts: int, samples: int, steps: int) -> np.ndarray:
    """Draw random numbers, (p, s, steps). Those of a sample do not depend on the other samples."""

    def draw(prompt: int, sample: int) -> np.ndarray:
        key = np.array([seed % 2**64, prompt << 32 | sample], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).random(steps)

    return np.array([[draw(p, s) for s in range(samples)] for p in range(first, first + num_prompts)])
