"""Requests of an engine: a text to be continued, the ticket that stands for it, and its tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from radq.decoding.config import Steering
from radq.decoding.steering import not_finite

FinishReason = Literal["stop", "length", "error", "cancelled"]
Processor = Callable[..., Tensor]  # (token ids of texts, logits) → logits


@dataclass(frozen=True, eq=False)
class Request:
    """A text to be continued.

    Attributes:
        prompt: its tokens.
        steering: candidates, temperature and KL budget.
        max_new_tokens: the most tokens of the continuation.
        uniforms: a random number in [0, 1) for each of them.
        beta: the strengths of the guide; None takes the guide's own.
        stops: tokens that end the text.
        watch: a function that is told every token, and says whether the text ends with it.
        processors: logits processors of transformers, which change the base model's logits before the steering.
        guides: the guides that steer the text, by their numbers in a sum; None for all of them. The strengths of the
            others do not matter.
        details: whether the results of its steps hold all candidates.
    """

    prompt: Sequence[int]
    steering: Steering
    max_new_tokens: int
    uniforms: np.ndarray
    beta: tuple[float, ...] | None = None
    stops: frozenset[int] = frozenset()
    watch: Callable[[int], bool] | None = None
    processors: tuple[Processor, ...] = ()
    guides: tuple[int, ...] | None = None
    details: bool = False


@dataclass(frozen=True)
class Token:
    """A token that was drawn, and numbers about it.

    Attributes:
        id: its number in the vocabulary.
        shift: what the guide added to its logit.
        kl: KL(guided ‖ base) over the candidates, in nats.
        clipped: the share of candidates whose reward was clamped.
        log_probability: under the base model, over the whole vocabulary, at temperature 1.
        guided_log_probability: under the distribution it was drawn from, over the candidates.
    """

    id: int
    shift: float
    kl: float
    clipped: float
    log_probability: float
    guided_log_probability: float


@runtime_checkable
class Continues(Protocol):
    """An engine, as its tickets see it."""

    def step(self) -> object: ...

    def finish(self, ticket: "Ticket", reason: FinishReason) -> None: ...


@dataclass(eq=False)
class Ticket:
    """A request in an engine, and what has come of it so far. Iterating over it yields its tokens."""

    engine: Continues
    request: Request
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
            self.engine.step()

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens of the prompt and those that have come so far."""
        return (*self.request.prompt, *(int(row[0]) for row in self.rows))

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
        self.engine.finish(self, "cancelled")
