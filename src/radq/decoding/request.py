"""Requests of an engine: a text to be continued, the ticket that stands for it, and its tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from radq.decoding.config import Steering
from radq.decoding.steering import not_finite
from radq.guides.base import Guide

FinishReason = Literal["stop", "length", "error", "cancelled"]
Processor = Callable[..., Tensor]  # (token ids of texts, logits) → logits


@dataclass(frozen=True, eq=False)
class Request:
    """A text to be continued."""

    prompt: Sequence[int]
    steering: Steering
    max_new_tokens: int
    uniforms: np.ndarray  # a random number in [0, 1) for each new token
    beta: tuple[float, ...] | None = None  # the strengths of the guide; None takes the guide's own
    stops: frozenset[int] = frozenset()  # tokens that end the text
    watch: Callable[[int], bool] | None = None  # is told every token, and says whether the text ends with it
    processors: tuple[Processor, ...] = ()  # change the base model's logits before the steering, as in transformers
    # The guides that steer the text, by their numbers in a sum; None for all. Strengths of the others do not matter.
    guides: tuple[int, ...] | None = None
    details: bool = False  # whether the results of its steps hold all candidates

    def asks_for(self, guide: int) -> bool:
        return self.guides is None or guide in self.guides

    def strengths(self, guide: Guide | None) -> tuple[float, ...]:
        """The strengths that the guide takes for this text."""
        if self.beta is not None:
            return self.beta
        return () if guide is None else guide.beta


@dataclass(frozen=True)
class Token:
    """A token that was drawn, and numbers about it."""

    id: int  # its number in the vocabulary
    shift: float  # what the guide added to its logit
    kl: float  # KL(guided ‖ base) over the candidates, in nats
    clipped: float  # the share of candidates whose reward was clamped
    log_probability: float  # under the base model, over the whole vocabulary, at temperature 1
    guided_log_probability: float  # under the distribution it was drawn from, over the candidates


@dataclass(eq=False)
class Ticket:
    """A request in an engine, and what has come of it so far. Iterating over it yields its tokens."""

    request: Request
    step: Callable[[], object]  # of its engine
    finish: Callable[["Ticket", FinishReason], None]
    rows: list[np.ndarray] = field(default_factory=list)  # of numbers, as in `Drawn`
    finish_reason: FinishReason | None = None
    place: int | None = None  # its row, while it runs
    error: Exception | None = None  # why it could not go on; None also where the guide gave no numbers
    stuck: int | None = None  # the number of its tokens when it found no memory although it ran alone

    def __iter__(self) -> Iterator[Token]:
        place = 0
        while True:
            while place < len(self.rows):
                row = self.rows[place]
                yield Token(int(row[0]), *row[1:6].tolist())
                place += 1
            if self.finish_reason is not None:
                if self.finish_reason == "error":
                    raise self.failure
                return
            self.step()

    @property
    def tokens(self) -> list[int]:
        """The tokens that have come so far."""
        return [int(row[0]) for row in self.rows]

    @property
    def text_tokens(self) -> list[int]:
        """The tokens that have come so far, without a stop token, which is no part of the text."""
        tokens = self.tokens
        return tokens[:-1] if tokens and tokens[-1] in self.request.stops else tokens

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens of the prompt and those that have come so far."""
        return (*self.request.prompt, *self.tokens)

    @property
    def left(self) -> int:
        """The most tokens that may still come."""
        return self.request.max_new_tokens - len(self.rows)

    @property
    def failure(self) -> Exception:
        """The error of a text that has ended with one."""
        return self.error or not_finite()

    def cancel(self) -> None:
        """Stop this text; its row is free for others from the next step on."""
        self.finish(self, "cancelled")
