"""A thread that decodes the texts of all requests together, and hands their tokens out as they come.

    scheduler.submit([text])      # from any thread; text.deliver is called in the scheduler's thread
    scheduler.cancel([text])      # its row is free from the next step on

Texts that name the same guides are decoded together, in an engine of their own; engines take turns, step by step.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radq.decoding.config import Steering
from radq.decoding.engine import Engine, Processor, Request, StepResult, Ticket
from radq.decoding.kept import keep_engine, take_engine
from radq.decoding.steering import not_finite
from radq.decoding.text import GrowingText
from radq.errors import RadqError, explain
from radq.serving.clock import ClockedGuide
from radq.serving.metrics import Metrics
from radq.serving.served import Served, perplexity

LOGGER = logging.getLogger(__name__)
MOST_CANDIDATES = 64  # that are told about a token


class BusyError(RadqError):
    """More texts wait than the operator allows."""


class ClosingError(RadqError):
    """The server is about to end."""


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
    guides: tuple[str, ...]  # in the order of `Served.order`
    strengths: tuple[float, ...]
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
        beta = self.strengths if self.guides else None
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

    def tell(self, result: StepResult, row: int, numbers: "_Numbers") -> None:
        """Note the candidates of a token, unless the text has begun again and this is known already."""
        if len(self._told) < len(result.tickets[row].rows):
            self._told.append(numbers.describe(row, self.guides))

    def summary(self) -> dict[str, Any]:
        """Means over the tokens of the text."""
        n = max(1, len(self.drawn))
        rewards = {
            name: sum(one.rewards[name] for one in self.drawn if one.rewards) / n
            for name in self.guides
            if self.drawn and self.drawn[0].rewards is not None
        }
        return {
            "kl": sum(one.kl for one in self.drawn) / n,
            "perplexity": perplexity(sum(one.base_logprob for one in self.drawn) / n),
            "shift": sum(one.shift for one in self.drawn) / n,
            "rewards": rewards,
        }


class _Numbers:
    """The candidates of a step, on the host."""

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

    def describe(self, row: int, guides: Sequence[str]) -> tuple[dict[str, float], list[Candidate]]:
        """The rewards of the chosen token, and the most likely candidates, with the chosen one."""
        order = np.argsort(-self.base[row], kind="stable")
        chosen = int(self.choice[row])
        order = [int(place) for place in order[:MOST_CANDIDATES] if self.base[row, place] > 0]
        order = order if chosen in order else [*order[: MOST_CANDIDATES - 1], chosen]
        return self._rewards(row, chosen, guides), [
            Candidate(
                int(self.candidates[row, place]),
                float(self.base[row, place]),
                float(self.guided[row, place]),
                float(max(self.shift[row, place], -1e30)),  # a guide forbids a candidate by −∞, which JSON has not
                self._rewards(row, place, guides),
            )
            for place in order
        ]

    def _rewards(self, row: int, place: int, guides: Sequence[str]) -> dict[str, float]:
        if self.rewards is None:
            return {}
        return {name: float(value) for name, value in zip(guides, self.rewards[row, place], strict=True)}


@dataclass(eq=False)
class _Lane:
    """An engine, and the texts that it decodes."""

    engine: Engine
    guide: ClockedGuide | None
    texts: dict[Ticket, Text] = field(default_factory=dict)


class Scheduler:
    """Decodes texts in a thread of its own, until `close`."""

    def __init__(self, served: Served, metrics: Metrics):
        self.served, self.metrics, self.limits = served, metrics, served.config.limits
        self._change = threading.Condition()
        self._waiting: deque[Text] = deque()
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._lanes: dict[tuple[tuple[str, ...], bool], _Lane] = {}
        self._clocked: dict[tuple[str, ...], ClockedGuide] = {}
        self._deadline = math.inf  # of texts that run while the server ends
        self._thread = threading.Thread(target=self._run, name="radq-scheduler", daemon=True)
        self._thread.start()

    # --- from any thread ---

    def submit(self, texts: Sequence[Text]) -> None:
        """Let texts wait for their turn, all or none of them."""
        with self._change:
            self._check_open()
            if len(self._waiting) + len(texts) > self.limits.queue + max(0, self.limits.rows - self.running):
                raise BusyError(f"{len(self._waiting)} texts are waiting already.", "try again later.")
            self._waiting += texts
            self._change.notify()

    def cancel(self, texts: Sequence[Text]) -> None:
        with self._change:
            for text in texts:
                text.cancelled = True
            self._change.notify()

    def call(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run a function between two steps, since models are used by one thread at a time."""
        future: Future[Any] = Future()
        with self._change:
            self._check_open()
            if len(self._tasks) >= self.limits.queue:
                raise BusyError(f"{len(self._tasks)} requests are waiting already.", "try again later.")
            self._tasks.append((work, future))
            self._change.notify()
        return future

    def close(self, seconds: float = 0.0) -> None:
        """Take no more texts, answer those that wait, and end the running ones within so many seconds."""
        with self._change:
            self._deadline = min(self._deadline, time.perf_counter() + seconds)
            self._change.notify()

    def join(self) -> None:
        """Wait for the end of the thread, after `close`."""
        self._thread.join()

    @property
    def closing(self) -> bool:
        return self._deadline < math.inf

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        return sum(len(lane.texts) for lane in list(self._lanes.values()))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """The memory that running texts hold in keys and values."""
        return sum(lane.engine.decoder.nbytes for lane in list(self._lanes.values()))

    def _check_open(self) -> None:
        if self.closing:
            raise ClosingError("the server is about to end.", "send the request to another server, or later.")

    # --- in the scheduler's thread ---

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # a bug: nothing more is decoded, and every client is told
            self._deadline = 0.0
            for lane in self._lanes.values():
                self._fail(lane, error)
            self._refuse_waiting()

    def _work(self) -> None:
        while True:
            with self._change:
                while not (self._waiting or self._tasks or self._lanes or self.closing):
                    self._change.wait()
                if self.closing and not self._lanes and not self._tasks:
                    self._refuse_waiting()
                    return
            self._obey_deadline()
            self._admit()
            if self._tasks:
                self._do(*self._tasks.popleft())
            for key, lane in list(self._lanes.items()):
                self._step(lane)
                if not lane.texts:
                    self._put_away(key)

    def _obey_deadline(self) -> None:
        if self.closing:
            self._refuse_waiting()
        if time.perf_counter() > self._deadline:
            for lane in self._lanes.values():
                for text in lane.texts.values():
                    text.cancelled = True

    def _refuse_waiting(self) -> None:
        while self._waiting:
            text = self._waiting.popleft()
            text.deliver(Delivery(text, [], finish_reason="cancelled", error="the server is about to end."))

    def _do(self, work: Callable[[], Any], future: "Future[Any]") -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _admit(self) -> None:
        """Let waiting texts join their engines while there is room."""
        while self._waiting and self.running < self.limits.rows:
            text = self._waiting.popleft()
            if text.cancelled:
                text.deliver(Delivery(text, [], finish_reason="cancelled"))
                continue
            lane = self._lane(text.guides, text.details)
            lane.texts[lane.engine.submit(text.request())] = text

    def _lane(self, guides: tuple[str, ...], details: bool) -> _Lane:
        key = guides, details
        if key not in self._lanes:
            guide = self._guide(guides) if guides else None
            rows = self.limits.rows
            engine = (
                Engine(self.served.lm, guide, rows, details=True)
                if details
                else take_engine(self.served.lm, guide, rows)
            )
            self._lanes[key] = _Lane(engine, guide)
        return self._lanes[key]

    def _guide(self, names: tuple[str, ...]) -> "ClockedGuide":
        if names not in self._clocked:
            self._clocked[names] = ClockedGuide(self.served.guide(names))
        return self._clocked[names]

    def _step(self, lane: _Lane) -> None:
        """Draw a token for each text of a lane, and deliver what has come."""
        for ticket, text in lane.texts.items():
            if text.cancelled:
                ticket.cancel()
        began, guided = time.perf_counter(), 0.0 if lane.guide is None else lane.guide.seconds
        try:
            results = lane.engine.step()
        except Exception as error:
            self._fail(lane, error)
            return
        for result in results:
            if result.drawn is not None:
                self._tell(lane, result)
        self.metrics.count_step(time.perf_counter() - began, 0.0 if lane.guide is None else lane.guide.seconds - guided)
        for ticket, text in list(lane.texts.items()):
            self._deliver(lane, ticket, text)

    def _tell(self, lane: _Lane, result: StepResult) -> None:
        numbers = _Numbers(result)
        for row, ticket in enumerate(result.tickets):
            if ticket in lane.texts:
                lane.texts[ticket].tell(result, row, numbers)

    def _deliver(self, lane: _Lane, ticket: Ticket, text: Text) -> None:
        first = not text.drawn
        tokens = text.take(ticket)
        if tokens:
            self.metrics.count_tokens(text, tokens, first)
        if ticket.finish_reason is not None:
            del lane.texts[ticket]
            error = str(not_finite()) if ticket.finish_reason == "error" else None
            if ticket.finish_reason == "cancelled" and self.closing:
                error = "the server is about to end."
            text.deliver(Delivery(text, tokens, text.growing.end(), ticket.finish_reason, error))
        elif tokens:
            text.deliver(Delivery(text, tokens))

    def _fail(self, lane: _Lane, error: Exception) -> None:
        """End the texts of a lane after an error of its engine; other texts go on."""
        LOGGER.error("decoding failed", exc_info=error)
        reason = explain(error) or "decoding failed; the server's log says why."
        texts, lane.texts = lane.texts, {}
        for text in texts.values():
            text.deliver(Delivery(text, [], finish_reason="error", error=reason))
        lane.engine.decoder.clear()

    def _put_away(self, key: Any) -> None:
        """Give the memory of an engine without texts back; on a GPU its captured steps are kept."""
        lane = self._lanes.pop(key)
        if not lane.engine.details and not lane.engine.busy:
            keep_engine(lane.engine)
