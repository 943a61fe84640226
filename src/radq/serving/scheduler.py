"""A thread that decodes the texts of all requests together, and hands their tokens out as they come.

    scheduler.submit([text])      # from any thread; text.deliver is called in the scheduler's thread
    scheduler.cancel([text])      # its row is free from the next step on

Texts that need the same guides are decoded together, in an engine of their own; engines take turns, step by step.
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

from radq.decoding.engine import Engine, StepResult
from radq.decoding.kept import keep_engine, take_engine
from radq.decoding.request import Ticket
from radq.errors import RadqError, explain
from radq.models.prompt_parts import PromptParts
from radq.serving.clock import ClockedGuide
from radq.serving.details import StepNumbers
from radq.serving.metrics import Metrics
from radq.serving.served import Served
from radq.serving.texts import Delivery, Text

LOGGER = logging.getLogger(__name__)
TASKS_AT_ONCE = 4  # of those that wait, each of which may hold the keys and values of a text
PROMPT_BUDGET = {"cpu": 128, "cuda": 8192}  # tokens of prompts that all models read between two steps of running texts


class BusyError(RadqError):
    """An error for a request that comes while as many texts wait as the operator allows."""


class ClosingError(RadqError):
    """An error for a request that comes while the server is about to end."""


@dataclass(eq=False)
class _Lane:
    """An engine, and the texts that it decodes."""

    engine: Engine
    guide: ClockedGuide | None
    texts: dict[Ticket, Text] = field(default_factory=dict)


@dataclass(eq=False)
class _Task:
    """Work of the models that is no text to decode, such as scores, and how far they have read for it."""

    work: Callable[[], Any]
    future: "Future[Any]" = field(default_factory=Future)
    parts: PromptParts = field(default_factory=PromptParts)

    def go_on(self, tokens: int) -> bool:
        """Let models read so many tokens together; return whether the task has ended."""
        try:
            if not self.future.cancelled() and not self.parts.read(tokens, self.work):
                return False
        except Exception as error:
            self.fail(error)
        else:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(self.parts.result)
        return True

    def fail(self, error: Exception) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class Scheduler:
    """Decodes texts in a thread of its own, until `close`."""

    def __init__(self, served: Served, metrics: Metrics):
        self.served, self.metrics, self.limits = served, metrics, served.config.limits
        self._change = threading.Condition()
        self._waiting: deque[Text] = deque()
        self._tasks: deque[_Task] = deque()
        self._lanes: dict[tuple[tuple[int, ...], bool], _Lane] = {}
        self._clocked: dict[tuple[int, ...], ClockedGuide] = {}
        self._round = 0
        self._deadline = math.inf  # of texts that run while the server ends
        metrics.watch(lambda: self.waiting, lambda: self.running, lambda: self.nbytes)
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
        """Run a function between two steps, since models are used by one thread at a time.

        Its models read texts in parts, as those of prompts: it is called again and again until they have read all.
        """
        task = _Task(work)
        with self._change:
            self._check_open()
            if len(self._tasks) >= self.limits.queue:
                raise BusyError(f"{len(self._tasks)} requests are waiting already.", "try again later.")
            self._tasks.append(task)
            self._change.notify()
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
            self._refuse_tasks()

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
            self._read_prompts_or_do_task()
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

    def _refuse_tasks(self) -> None:
        while self._tasks:
            self._tasks.popleft().fail(
                ClosingError("the server is about to end.", "send the request to another server.")
            )

    def _do_task(self) -> None:
        """Do a part of a task. The first tasks take turns, so that a short one does not wait for a long one."""
        budget = PROMPT_BUDGET["cpu" if self.served.lm.device.type == "cpu" else "cuda"]
        ended = self._tasks[0].go_on(budget)
        task = self._tasks.popleft()
        if not ended:
            self._tasks.insert(TASKS_AT_ONCE - 1, task)

    def _admit(self) -> None:
        """Let waiting texts join their engines while there is room; those that were cancelled leave."""
        with self._change:
            cancelled = [text for text in self._waiting if text.cancelled]
            self._waiting = deque(text for text in self._waiting if not text.cancelled)
        for text in cancelled:
            text.deliver(Delivery(text, [], finish_reason="cancelled"))
        while self._waiting and self.running < self.limits.rows:
            text = self._waiting.popleft()
            lane = self._lane(text.selection.guides, text.details)
            lane.texts[lane.engine.submit(text.request())] = text

    def _lane(self, guides: tuple[int, ...], details: bool) -> _Lane:
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

    def _read_prompts_or_do_task(self) -> None:
        """Choose what is read in this round, prompts of one lane or a task, so that no text waits for all of them."""
        self._round += 1
        readers: list[_Lane | None] = [lane for lane in self._lanes.values() if lane.engine.has_prompts]
        if self._tasks:
            readers.append(None)
        chosen = readers[self._round % len(readers)] if readers else None
        for lane in self._lanes.values():
            lane.engine.prompt_budget = PROMPT_BUDGET[lane.engine.kind] if lane is chosen else 0
        if chosen is None and self._tasks:
            self._do_task()

    def _guide(self, numbers: tuple[int, ...]) -> ClockedGuide:
        if numbers not in self._clocked:
            self._clocked[numbers] = ClockedGuide(self.served.panel.sum(numbers))
        return self._clocked[numbers]

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
        assert result.drawn is not None
        numbers = StepNumbers(result.drawn.proposal)
        for row, (ticket, chosen) in enumerate(zip(result.tickets, result.drawn.choice.tolist(), strict=False)):
            if ticket in lane.texts:
                lane.texts[ticket].tell(ticket, row, chosen, numbers)

    def _deliver(self, lane: _Lane, ticket: Ticket, text: Text) -> None:
        first = not text.drawn
        tokens = text.take(ticket)
        if tokens:
            self.metrics.count_tokens(text, tokens, first)
        if ticket.finish_reason is not None:
            del lane.texts[ticket]
            error = str(ticket.failure) if ticket.finish_reason == "error" else None
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
