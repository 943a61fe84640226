"""Texts that requests ask for, on their way through the engine, and the updates of their tokens."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radq.decoding.config import Steering
from radq.decoding.request import Processor, Request, Ticket
from radq.decoding.text import GrowingText
from radq.registry.details import Candidate, Drawn, StepNumbers, summarise
from radq.registry.loaded_guides import Selection


@dataclass(frozen=True)
class TextUpdate:
    """An update with new tokens of a text, or of its end."""

    text: "Text"
    tokens: list[Drawn]
    rest: str = ""  # what becomes final at the end of the text
    finish_reason: str | None = None
    error: str | None = None


@dataclass(eq=False)
class Text:
    """A text that a request asks for."""

    index: int  # among the texts of its request
    prompt: list[int]
    steering: Steering
    selection: Selection
    max_tokens: int
    uniforms: np.ndarray
    stops: frozenset[int]
    growing: GrowingText
    deliver: Callable[[TextUpdate], None]
    parsed: Any = None  # the request that it belongs to, and
    client: str = ""  # who sent it: requests of clients take turns
    details: bool = False
    processors: tuple[Processor, ...] = ()
    tells_stop: bool = False  # whether a stop token is told, as one without text
    arrived: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    drawn: list[Drawn] = field(default_factory=list)
    count: int = 0  # tokens, with a stop token
    _pieces: list[str] = field(default_factory=list)
    _told: list[list[Candidate]] = field(default_factory=list)  # of each token, where the request has details

    def request(self) -> Request:
        return Request(
            self.prompt,
            self.steering,
            self.max_tokens,
            self.uniforms,
            self.selection.strengths,
            self.stops,
            self._watch,
            self.processors,
            self.selection.guides,
            self.details,
        )

    def _watch(self, token: int) -> bool:
        """Add a token to the text; return whether the text ends at a stop string."""
        self._pieces.append(self.growing.add(token))
        return self.growing.stopped

    def take(self, ticket: Ticket) -> list[Drawn]:
        """Take the tokens that have come since the last call; a stop token is not one of them, unless it is told."""
        fresh = []
        if self.tells_stop and ticket.finish_reason == "stop" and len(self._pieces) < len(ticket.rows):
            self._pieces.append("")
        for place in range(len(self.drawn), len(self._pieces)):
            token, shift, kl, _, base, guided, _, *told = ticket.rows[place].tolist()
            rewards = {name: told[column] for name, column in self.selection.places.items()} if told else None
            candidates = self._told[place] if place < len(self._told) else None
            fresh.append(Drawn(int(token), self._pieces[place], shift, kl, base, guided, rewards, candidates))
        self.drawn += fresh
        self.count = max(self.count, len(ticket.rows))
        return fresh

    def tell(self, ticket: Ticket, row: int, chosen: int, numbers: StepNumbers) -> None:
        """Note the candidates of a token, unless the text has ended before it."""
        if len(self._told) < len(ticket.rows):
            self._told.append(numbers.row(row, self.selection.places).tell(chosen)[1])

    def summary(self) -> dict[str, Any]:
        """Compute means over the tokens of the text."""
        return summarise(self.drawn, list(self.selection.places))
