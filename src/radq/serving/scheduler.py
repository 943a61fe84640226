"""A thread that decodes the texts of all requests together, and hands their tokens out as they come.

    scheduler.submit([text])      # from any thread; text.deliver is called in the scheduler's thread
    scheduler.cancel([text])      # its row is free from the next step on

One engine decodes all texts, whatever guides they need: its guide is the sum of all, and each follows its own texts.

Whatever goes wrong, every client is told, and the thread begins anew with another engine. If that fails again and
again, the scheduler is broken, and its process must end: a server that is up and decodes nothing helps nobody.
"""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, TypeVar

import numpy as np

from radq.decoding.config import Steering
from radq.decoding.engine import KEPT, Engine, StepResult, keep_engine, take_engine
from radq.decoding.request import FinishReason, Request, Ticket
from radq.errors import explain
from radq.guides.base import Guide
from radq.models.prefill import InTurns, Prefill, Turn
from radq.registry.details import StepNumbers
from radq.registry.loaded_guides import Served
from radq.registry.problems import UnavailableError
from radq.serving.metrics import ClockedGuide, Metrics
from radq.serving.parsed_request import ServedText, TextUpdate

LOGGER = logging.getLogger(__name__)
T = TypeVar("T")
TASKS_AT_ONCE = 4  # of those that wait, each of which may hold the keys and values of a text
SPARE = 4  # rows for each of which there is one more, for those whom the texts of another hold up
MOST_FAILURES = 3  # in a row, without a token between them, after which a new beginning is no longer tried
PAUSE = 1.0  # seconds before a new beginning, times the failures in a row
FAILED = "decoding failed; the server's log says why."
ENDING = "the server is about to end."
LATER = "try again later."
ELSEWHERE = "send the request to another server, or later."
PROMPT_BUDGET = {"cpu": 128, "cuda": 8192}  # tokens of prompts that all models read between two steps of running texts


@dataclass(eq=False)
class _Task:
    """Work of the models that is no text to decode, such as scores, and how far they have read for it."""

    prefill: Prefill[Any]
    future: "Future[Any]" = field(default_factory=Future)

    def go_on(self, tokens: int) -> bool:
        """Let models read so many tokens together; return whether the task has ended."""
        try:
            if not self.future.cancelled() and not self.prefill.read(tokens):
                return False
        except Exception as error:
            self.fail(error)
        else:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(self.prefill.result)
        return True

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Scheduler:
    """Decodes texts in a thread of its own, until `close`."""

    def __init__(self, served: Served, metrics: Metrics):
        self.served, self.metrics, self.limits = served, metrics, served.config.limits
        self._change = threading.Condition()
        self._waiting: deque[ServedText] = deque()
        self._tasks: deque[_Task] = deque()
        self._spare = max(1, self.limits.rows // SPARE)
        guides: list[Guide] = [ClockedGuide(guide, metrics.guide_seconds.inc) for guide in served.loaded.guides]
        self._guide = reduce(add, guides) if guides else None
        self._engine: Engine | None = None  # while there are texts
        self._texts: dict[Ticket, ServedText] = {}  # that it decodes
        self._deadline = math.inf  # of texts that run while the server ends
        self._turn = False  # whether it is that of a task, not of prompts
        self._failures = 0  # in a row, without a token between them
        self.broken = False  # whether nothing can be decoded any more
        self.when_broken: Callable[[], None] = lambda: None  # called in the scheduler's thread
        metrics.waiting.set_function(lambda: self.waiting)
        metrics.running.set_function(lambda: self.running)
        metrics.memory.set_function(lambda: self.nbytes)
        self._thread = threading.Thread(target=self._run, name="radq-scheduler", daemon=True)
        self._thread.start()

    # --- from any thread ---

    def submit(self, texts: Sequence[ServedText]) -> None:
        """Let texts wait for their turn, all or none of them."""
        with self._change:
            room = self.limits.queue + max(0, self.limits.rows - self.running)
            self._add(self._waiting, texts, "texts", room)

    def _add(self, queue: "deque[Any]", new: Sequence[Any], noun: str, most: int) -> None:
        """Append to a queue, unless the server ends or the queue is full."""
        with self._change:
            if self.broken or self.closing:
                raise UnavailableError(FAILED if self.broken else ENDING, ELSEWHERE)
            if len(queue) + len(new) > most:
                raise UnavailableError(f"{len(queue)} {noun} are waiting already.", LATER, status=429)
            queue.extend(new)
            self._change.notify()

    def cancel(self, texts: Sequence[ServedText]) -> None:
        with self._change:
            for text in texts:
                text.cancelled = True
            self._change.notify()

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Run a function between two steps, since models are used by one thread at a time."""

        def at_once(_: Turn) -> InTurns[T]:
            yield from ()
            return work()

        return self.call_in_turns(at_once)

    def call_in_turns(self, work: Callable[[Turn], InTurns[T]]) -> "Future[T]":
        """Let models read texts between steps, as much in each turn as of prompts."""
        task = _Task(Prefill(work))
        self._add(self._tasks, [task], "requests", self.limits.queue)
        return task.future

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
        return len(self._texts)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """The memory that running texts hold in keys and values."""
        return 0 if (engine := self._engine) is None else engine.decoder.nbytes

    # --- in the scheduler's thread ---

    def _run(self) -> None:
        """Work until `close`. After an error outside of the engines' steps, which is a bug, begin anew."""
        while not self.broken:
            try:
                if self._failures:
                    self._try_device()
                self._work()
                return
            except Exception as error:
                self._failures += 1
                LOGGER.critical("the scheduler failed", exc_info=error)
                self._fail_all(explain(error) or FAILED)
                self.broken = self._failures >= MOST_FAILURES
                time.sleep(PAUSE * (self._failures - 1) * (not self.broken))
        self._fail_all(FAILED)  # what has come meanwhile
        self.when_broken()

    def _try_device(self) -> None:
        """Decode one token, which fails where a GPU can no longer be used by this process."""
        vars(self.served.lm).pop(KEPT, None)
        prompt = self.served.encode("a") or [0]
        list(Engine(self.served.lm, None, 1).submit(Request(prompt, Steering(), 1, np.zeros(1))))

    def _fail_all(self, reason: str) -> None:
        """End all texts, and answer everybody who waits, with an error."""
        self._fail_running(reason)
        with self._change:
            waiting, self._waiting = self._waiting, deque()
            tasks, self._tasks = self._tasks, deque()
        _end_texts(waiting, "error", reason)
        for task in tasks:
            task.fail(UnavailableError(reason))

    def _fail_running(self, reason: str) -> None:
        texts, self._texts, self._engine = self._texts, {}, None
        _end_texts(texts.values(), "error", reason)

    def _work(self) -> None:
        while True:
            with self._change:
                while not (self._waiting or self._tasks or self._texts or self.closing):
                    self._change.wait()
            self._obey_deadline()
            if self.closing and not (self._waiting or self._tasks or self._texts):
                return
            self._admit()
            self._read_prompts_or_do_task()
            if self._engine is not None:
                self._step(self._engine)

    def _obey_deadline(self) -> None:
        if self.closing:
            waiting, self._waiting = self._waiting, deque()
            _end_texts(waiting, "cancelled", ENDING)
        if time.perf_counter() > self._deadline:
            for text in self._texts.values():
                text.cancelled = True
            while self._tasks:
                self._tasks.popleft().fail(UnavailableError(ENDING, ELSEWHERE))

    def _read_prompts_or_do_task(self) -> None:
        """Let prompts and tasks take turns, so that running texts never wait for both.

        The first tasks take turns, too, so that a short one does not wait for a long one.
        """
        engine, budget = self._engine, PROMPT_BUDGET["cpu" if self.served.lm.device.type == "cpu" else "cuda"]
        self._turn = not self._turn
        does_task = bool(self._tasks) and (self._turn or engine is None or not engine.has_prompts)
        if engine is not None:
            engine.prompt_budget = 0 if does_task else budget
        if does_task:
            ended = self._tasks[0].go_on(budget)
            task = self._tasks.popleft()
            if not ended:
                self._tasks.insert(TASKS_AT_ONCE - 1, task)

    def _admit(self) -> None:
        """Let waiting texts join the engine while there is room; those that were cancelled leave."""
        with self._change:
            cancelled = [text for text in self._waiting if text.cancelled]
            self._waiting = deque(text for text in self._waiting if not text.cancelled)
        _end_texts(cancelled, "cancelled")
        while (text := self._choose()) is not None:
            if self._engine is None:
                self._engine = take_engine(self.served.lm, self._guide, self.limits.rows + self._spare)
            self._texts[self._engine.submit(text.request)] = text
            self._waiting.remove(text)  # not before: it must not be lost if something fails

    def _choose(self) -> ServedText | None:
        """Choose the next text: of the client, and then of the request, with the fewest running ones.

        When all rows are taken, it may have a spare one if nothing of its client or request runs beside several texts
        of another. Otherwise long texts of one request would hold up all others until they end.
        """
        waiting, room = list(self._waiting), self.limits.rows - self.running
        if not waiting or room <= -self._spare:
            return None
        running = self._texts.values()
        clients, requests = Counter(text.client for text in running), Counter(text.parsed for text in running)
        text = min(waiting, key=lambda text: (clients[text.client], requests[text.parsed]))
        held_up = _is_held_up(text.client, clients) or _is_held_up(text.parsed, requests)
        return text if room > 0 or held_up else None

    def _step(self, engine: Engine) -> None:
        """Draw a token for each text, and deliver what has come."""
        for ticket, text in self._texts.items():
            if text.cancelled:
                ticket.cancel()
        began = time.perf_counter()
        try:
            results = engine.step()
        except Exception as error:  # a bug; texts that wait will have another engine
            LOGGER.error("decoding failed", exc_info=error)
            self._fail_running(explain(error) or FAILED)
            self._try_device()
            return
        for result in results:
            if result.drawn is not None:
                self._tell(result)
        self.metrics.count_step(time.perf_counter() - began)
        for ticket, text in list(self._texts.items()):
            self._deliver(ticket, text)
        if not self._texts:
            self._put_away(engine)

    def _put_away(self, engine: Engine) -> None:
        """Give the memory of the engine back; on a GPU its captured steps are kept."""
        self._engine = None
        if not engine.busy:
            keep_engine(engine)

    def _tell(self, result: StepResult) -> None:
        assert result.drawn is not None
        numbers = StepNumbers(result.drawn.proposal)
        for row, (ticket, chosen) in enumerate(zip(result.tickets, result.drawn.choice.tolist(), strict=False)):
            text = self._texts.get(ticket)
            if text is not None and text.parsed.details:
                text.tell(ticket, row, chosen, numbers)

    def _deliver(self, ticket: Ticket, text: ServedText) -> None:
        first = not text.drawn
        tokens = text.take(ticket)
        if tokens:
            self._failures = 0
            self.metrics.count_tokens(text, tokens, first)
        if ticket.finish_reason is not None:
            del self._texts[ticket]
            error = str(ticket.failure) if ticket.finish_reason == "error" else None
            if ticket.finish_reason == "cancelled" and self.closing:
                error = ENDING
            text.deliver(TextUpdate(text, tokens, text.growing.end(), ticket.finish_reason, error))
        elif tokens:
            text.deliver(TextUpdate(text, tokens))


def _end_texts(texts: Iterable[ServedText], reason: FinishReason, error: str | None = None) -> None:
    for text in texts:
        text.deliver(TextUpdate(text, [], finish_reason=reason, error=error))


def _is_held_up(one: Any, running: "Counter[Any]") -> bool:
    """Whether nothing of a client or request runs, and several texts of another do."""
    return not running[one] and max(running.values(), default=0) > 1
