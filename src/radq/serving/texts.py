"""Texts that requests ask for, on their way through the engine, and the news of them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radq.decoding.config import Steering
from radq.decoding.engine import Processor, Request, StepResult, Ticket
from radq.decoding.text import GrowingText
from radq.serving.panel import Selection
from radq.serving.served import perplexity

MOST_CANDIDATES = 64  # that are told about a token


@dataclass(frozen=True)
class Candidate:
    """A token that could have been drawn; probabilities are over the candidates, at the temperature of the request."""

    id: int
    base_probability: float
    probability: float
    shift: float
    rewards: dict[str, float]


@dataclass(frozen=True)
class Drawn:
    """A token that was drawn, with the text that became final with it."""

    id: int
    piece: str
    shift: float
    kl: float
    base_logprob: float  # under the base model alone, over the whole vocabulary, at temperature 1
    logprob: float  # in the distribution that it was drawn from
    rewards: dict[str, float] | None = None
    candidates: list[Candidate] | None = None


@dataclass(frozen=True)
class Delivery:
    """News of a text: tokens, or its end."""

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
    deliver: Callable[[Delivery], None]
    details: bool = False
    processors: tuple[Processor, ...] = ()
    arrived: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    drawn: list[Drawn] = field(default_factory=list)
    count: int = 0  # tokens, with a stop token
    _pieces: list[str] = field(default_factory=list)
    _told: list[tuple[dict[str, float], list[Candidate]]] = field(default_factory=list)  # of each token, in detail

    def request(self) -> Request:
        beta = self.selection.strengths if self.selection.guides else None
        return Request(
            self.prompt,
            self.steering,
            self.max_tokens,
            self.uniforms,
            beta,
            self.stops,
            self._watch,
            self.processors,
        )

    def _watch(self, token: int) -> bool:
        """Add a token to the text; return whether the text ends at a stop string."""
        self._pieces.append(self.growing.add(token))
        return self.growing.stopped

    def take(self, ticket: Ticket) -> list[Drawn]:
        """The tokens that have come since the last call; a stop token is not one of them."""
        fresh = []
        for place in range(len(self.drawn), len(self._pieces)):
            token, shift, kl, _, base, guided, _ = ticket.rows[place].tolist()
            rewards, candidates = self._told[place] if place < len(self._told) else (None, None)
            fresh.append(Drawn(int(token), self._pieces[place], shift, kl, base, guided, rewards, candidates))
        self.drawn += fresh
        self.count = max(self.count, len(ticket.rows))
        return fresh

    def tell(self, result: StepResult, row: int, numbers: "StepNumbers") -> None:
        """Note the candidates of a token, unless the text has begun again and this is known already."""
        if len(self._told) < len(result.tickets[row].rows):
            self._told.append(numbers.describe(row, self.selection.places))

    def summary(self) -> dict[str, Any]:
        """Means over the tokens of the text."""
        n = max(1, len(self.drawn))
        rewards = {
            name: sum(one.rewards[name] for one in self.drawn if one.rewards) / n
            for name in self.selection.places
            if self.drawn and self.drawn[0].rewards is not None
        }
        return {
            "kl": sum(one.kl for one in self.drawn) / n,
            "perplexity": perplexity(sum(one.base_logprob for one in self.drawn) / n),
            "shift": sum(one.shift for one in self.drawn) / n,
            "rewards": rewards,
        }


class StepNumbers:
    """The candidates of a step for all its rows, on the host."""

    def __init__(self, result: StepResult):
        assert result.drawn is not None
        proposal = result.drawn.proposal
        self.candidates = proposal.candidates.cpu().numpy()
        self.choice = result.drawn.choice.cpu().numpy()
        self.base = proposal.base.double().softmax(-1).cpu().numpy()
        self.guided = proposal.logits.double().softmax(-1).cpu().numpy()
        self.shift = proposal.shift.double().cpu().numpy()
        parts = proposal.rewards or ()
        self.rewards = np.concatenate([part.double().cpu().numpy() for part in parts], axis=2) if parts else None

    def describe(self, row: int, places: Mapping[str, int]) -> tuple[dict[str, float], list[Candidate]]:
        """The rewards of the chosen token, and the most likely candidates, with the chosen one."""
        order = np.argsort(-self.base[row], kind="stable")
        chosen = int(self.choice[row])
        order = [int(place) for place in order[:MOST_CANDIDATES] if self.base[row, place] > 0]
        order = order if chosen in order else [*order[: MOST_CANDIDATES - 1], chosen]
        return self._rewards(row, chosen, places), [
            Candidate(
                int(self.candidates[row, place]),
                float(self.base[row, place]),
                float(self.guided[row, place]),
                float(max(self.shift[row, place], -1e30)),  # a guide forbids a candidate by −∞, which JSON has not
                self._rewards(row, place, places),
            )
            for place in order
        ]

    def _rewards(self, row: int, candidate: int, places: Mapping[str, int]) -> dict[str, float]:
        if self.rewards is None:
            return {}
        return {name: float(self.rewards[row, candidate, place]) for name, place in places.items()}
