"""Continuous batching: requests join and leave the running rows at any step.

    engine = Engine(lm, guide)
    ticket = engine.submit(Request(prompt=[5, 9], steering=Steering(), max_new_tokens=20, uniforms=numbers))
    for token in ticket:             # decodes all running requests until this one has its next token
        print(token.id, token.shift)

An engine works when somebody iterates over a ticket, calls `step`, or calls `run`. A text depends on its own prompt,
settings and random numbers, and not on the requests beside it (but for the rounding of half precision).

On a GPU the numbers of a step come to the host some steps later, so that the device never waits: a text may run a few
tokens past its stop, and they are thrown away.
"""

import gc
import sys
import warnings
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from radq.decoding.capture import describe
from radq.decoding.decoder import Decoder, Drawn, Read
from radq.decoding.guide_rows import fill_gaps
from radq.decoding.request import FinishReason, Processor, Request, Ticket
from radq.errors import MemoryLimitError
from radq.guides.base import Guide
from radq.models.loading import Wrappable, evaluating
from radq.models.prefill import Prefill
from radq.numerics import at_least_float32, available_memory, empty_cache

LAG = 2  # steps between the work of a GPU and the reading of its results
PROMPT_TOKENS = {"cpu": 4096, "cuda": 16384}  # of prompts that are read together
MOST_ROWS = {"cpu": 64, "cuda": 8192}
MEMORY_SHARE = 0.7  # of the free memory may be filled with rows
CALM = 2048  # steps without full memory, after which twice as many rows are tried
FEWER = 0.75  # rows are moved together when so few of them are still running
KEPT = "_radq_kept"  # an attribute of base models, see `take_engine`
MOST_KEPT = 4  # engines that are kept for other calls
MOST_BYTES = 2**31  # of all of them, or
MOST_SHARE = 8  # an eighth of the memory of a GPU, where that is more


_HALVED: WeakKeyDictionary[Wrappable, int] = WeakKeyDictionary()  # rows that fit, by base model, after memory was full


@dataclass(frozen=True)
class _Joining:
    """Requests that join the running ones together, as soon as their prompts are read."""

    tickets: list[Ticket]
    prompts: dict[tuple[int, ...], int]  # numbered, each once
    prefill: Prefill[Read | None]


@dataclass(frozen=True)
class StepResult:
    """The tokens that one step has drawn."""

    tickets: list[Ticket]  # of its rows
    drawn: Drawn | None  # on the device, if some request wants details
    last: np.ndarray  # whether this is the last token of a row at the latest
    sent: Tensor  # the numbers about the tokens, which an event says to have come to the host
    event: torch.cuda.Event | None

    @cached_property
    def numbers(self) -> np.ndarray:
        """The numbers about the tokens, (b, n)."""
        if self.event is not None:
            self.event.synchronize()
        return self.sent.cpu().numpy()


class Engine:
    """Continues the texts of all requests together, with one base model and one guide.

    Of a sum of guides, each text is steered and read by those parts alone that its request asks for.
    """

    def __init__(
        self,
        lm: Wrappable,
        guide: Guide | None = None,
        max_rows: int | None = None,
        captures: bool = True,
        compile: bool = False,
    ):
        """At most `max_rows` texts are decoded together; by default as many as fit into free memory.

        With `captures`, steps on a CUDA device are captured as graphs, which is faster and gives the same texts. With
        `compile`, torch.compile takes up to some minutes, and steps of small models are faster.
        """
        self.lm, self.guide, self.max_rows, self.compile = lm, guide, max_rows, compile
        if not lm.training:
            lm.eval()  # also those of its parts that are not
        # The tokens of prompts that base model and guide together read between two steps of texts; None for no limit.
        self.prompt_budget: int | None = None
        self.decoder = Decoder(lm, guide, captures, compile)
        self.made_with: Hashable = None  # see `take_engine`
        self.kind = "cuda" if lm.device.type != "cpu" else "cpu"
        self.lag = LAG if lm.device.type == "cuda" else 0
        self.waiting: deque[Ticket] = deque()
        self._joining: _Joining | None = None
        self.running: list[Ticket] = []  # in the order of the decoder's rows; some of them may have ended
        self._left = np.zeros(0, dtype=np.int64)  # tokens still to be drawn in each row; 0 if it has ended
        self._in_flight: deque[StepResult] = deque()
        self._fitting: int | None = None  # rows that fit into memory
        self._calm = 0  # steps since memory was full
        self._stops: set[int] = set()  # tokens that end some text
        self._watches = False  # whether some request has a function that is told every token
        self._processes = False  # whether some running request has logits processors
        self._tells = False  # whether some running request wants all candidates

    # --- requests ---

    def submit(self, request: Request) -> Ticket:
        """Add a request; it joins the running ones at the next step that has room."""
        ticket = Ticket(request, self.step, self.finish)
        self.waiting.append(ticket)
        self._stops |= request.stops
        self._watches = self._watches or request.watch is not None
        return ticket

    def finish(self, ticket: Ticket, reason: FinishReason) -> None:
        """End a text. Its row is free for others from the next step on."""
        if ticket.finish_reason is None:
            ticket.finish_reason = reason
            if ticket.place is not None:
                self._left[ticket.place] = 0

    @property
    def busy(self) -> bool:
        return bool(self.has_prompts or self._in_flight or self._left.any())

    @property
    def has_prompts(self) -> bool:
        return bool(self.waiting or self._joining)

    def rest(self) -> "Engine":
        """Let all rows leave; the engine can be used again."""
        self._wait_again()
        for ticket in [*self.running, *self.waiting]:
            self.finish(ticket, "cancelled")
        self.waiting.clear()
        self._in_flight.clear()
        self._stops, self._watches, self.prompt_budget = set(), False, None
        self._keep([])
        return self

    @property
    def nbytes(self) -> int:
        """About the memory that the engine holds between steps."""
        return self.decoder.nbytes + self.decoder.capacity * self._scratch

    @property
    def _scratch(self) -> int:
        """Bytes of each row for logits, in several precisions."""
        return 64 * self.decoder.reader.vocabulary.size

    def run(self) -> Iterator[StepResult]:
        """Work until all requests have ended; yield the result of each step."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[StepResult]:
        """Draw a token for every running request; return the results that have arrived, maybe of earlier steps."""
        results: list[StepResult] = []
        # Streams and graphs belong to torch's current device, which need not be that of the base model.
        on_device = torch.cuda.device(self.lm.device) if self.lm.device.type == "cuda" else nullcontext()
        with evaluating(self.lm) if self.lm.training else nullcontext(), on_device:
            full = False
            try:
                self._work(results)
            except torch.OutOfMemoryError:
                full = True  # what the frames of the error hold is given back at the end of this block
            if full:
                self._go_back()
        return results

    def _work(self, results: list[StepResult]) -> None:
        self._arrange()
        if self._left.any():
            self._draw()
            self._receive(results)
            if self.decoder.may_leave:
                self._leave()  # what has ended need not be read
            if self._left.any():
                self.decoder.read()
        self._receive(results)

    # --- rows ---

    def _arrange(self) -> None:
        """Let rows leave that have ended, and others join."""
        running = int((self._left > 0).sum())
        self.waiting = deque(ticket for ticket in self.waiting if ticket.finish_reason is None)
        if self._joining and all(ticket.finish_reason is not None for ticket in self._joining.tickets):
            self._joining = None
        self._calm += 1
        if self._calm % CALM == 0:  # what had filled the memory may have left
            self._fitting = None
            if self.lm in _HALVED:
                _HALVED[self.lm] *= 2
        room = self._room() - running if self.has_prompts else 0
        if self.kind == "cpu" or running <= FEWER * len(self.running) or room > 0:
            self._leave()
        if self.prompt_budget is None:
            while self.waiting and room > 0:
                room -= self._join(self._choose(room))
        elif self.prompt_budget and self.has_prompts and room > 0:
            self._joining = self._joining or self._choose(room)
            if self._joining.prefill.read(self.prompt_budget):
                self._join(self._joining)

    def _leave(self) -> None:
        alive = np.flatnonzero(self._left).tolist()
        if len(alive) < len(self.running):
            self._keep(alive)

    def _keep(self, alive: list[int]) -> None:
        """Move the last rows into the places of those that have ended, so that few rows are copied."""
        rows = fill_gaps(alive)
        for ticket in self.running:
            ticket.place = None
        self.running, self._left = [self.running[row] for row in rows], self._left[rows]
        for place, ticket in enumerate(self.running):
            ticket.place = place
        self._look_at_running()
        self.decoder.keep(rows)

    def _room(self) -> int:
        """The number of rows that may run together."""
        most = min(self.max_rows or MOST_ROWS[self.kind], _HALVED.get(self.lm, sys.maxsize))
        if self.max_rows is None and self._fitting is None and self.decoder.slots:
            free = available_memory(str(self.lm.device))
            row = sum(slots.nbytes / slots.capacity * slots.copies for slots in self.decoder.slots) + self._scratch
            self._fitting = None if free is None else max(1, len(self.running) + int(MEMORY_SHARE * free / row))
        return min(most, self._fitting or most)

    def _choose(self, room: int) -> _Joining:
        """Take waiting requests whose prompts are read together."""
        chosen: list[Ticket] = []
        places: dict[tuple[int, ...], int] = {}
        longest, budget = 0, self.prompt_budget or PROMPT_TOKENS[self.kind]
        while self.waiting and len(chosen) < room:
            prompt = self.waiting[0].text
            longest = max(longest, len(prompt))
            if prompt not in places and places and longest * (len(places) + 1) > budget:
                break
            places.setdefault(prompt, len(places))
            chosen.append(self.waiting.popleft())
        rows, requests = [places[ticket.text] for ticket in chosen], [ticket.request for ticket in chosen]
        return _Joining(chosen, places, Prefill(partial(self.decoder.read_ahead, list(places), rows, requests)))

    def _join(self, joining: _Joining) -> int:
        """Let requests join, unless they were cancelled while their prompts were read; return their number."""
        self._joining = None
        chosen = [ticket for ticket in joining.tickets if ticket.finish_reason is None]
        left = [ticket.left for ticket in chosen]
        uniforms = np.zeros((len(chosen), max(left)))
        for row, ticket in enumerate(chosen):
            numbers = ticket.request.uniforms[len(ticket.rows) : ticket.request.max_new_tokens]
            uniforms[row, : len(numbers)] = numbers
        overhead = 0 if self.guide is None else max((reader.overhead for reader in self.guide.readers), default=0)
        for place, ticket in enumerate(chosen, start=len(self.running)):
            ticket.place = place
        self.running += chosen
        self._left = np.concatenate([self._left, left])
        self._look_at_running()
        self.decoder.add(
            list(joining.prompts),
            [joining.prompts[ticket.text] for ticket in chosen],
            [ticket.request for ticket in chosen],
            uniforms,
            capacity=min(self._room(), len(self.running) + len(self.waiting)),
            width=max(map(len, joining.prompts)) + max(left) + overhead,
            read=joining.prefill.result,
        )
        return len(chosen)

    def _look_at_running(self) -> None:
        """Note what the running requests need of each step."""
        self._processes = any(ticket.request.processors for ticket in self.running)
        self._tells = any(ticket.request.details for ticket in self.running)

    def _wait_again(self) -> None:
        """Let requests that are about to join wait again; nothing is known of their prompts any more."""
        if self._joining:
            self.waiting.extendleft(reversed(self._joining.tickets))
            self._joining = None

    # --- steps ---

    def _draw(self) -> None:
        drawn = self.decoder.draw(self._left > 0, self._process if self._processes else None)
        self._left = np.maximum(self._left - 1, 0)
        numbers = drawn.numbers[: len(self.running)]  # made anew by each step that is not captured
        event = None
        if self.lag and numbers.is_cuda:
            numbers, event = numbers.to("cpu", non_blocking=True), torch.cuda.Event()
            event.record()
        # The next step may write to the same memory.
        details = drawn.map(lambda values: values[: len(self.running)].clone()) if self._tells else None
        self._in_flight.append(StepResult(list(self.running), details, self._left == 0, numbers, event))

    def _process(self, logits: Tensor) -> Tensor:
        """Let the processors of each request change its logits. Rows of equal length are processed together."""
        logits = at_least_float32(logits).clone()
        groups: dict[tuple[tuple[Processor, ...], int], list[int]] = {}
        for place, ticket in enumerate(self.running):
            if ticket.request.processors:
                length = len(ticket.request.prompt) + len(ticket.rows)
                groups.setdefault((ticket.request.processors, length), []).append(place)
        for (processors, _), places in groups.items():
            tickets = [self.running[place] for place in places]
            texts = [ticket.text for ticket in tickets]
            input_ids, scores = torch.tensor(texts, device=logits.device), logits[places]
            for processor in processors:
                scores = processor(input_ids, scores)
            logits[places] = scores.to(logits)
        return logits

    def _receive(self, results: list[StepResult]) -> None:
        """Take the results of all steps but the last ones; of all, if no more come or somebody must see them now."""
        behind = self.lag if self._left.any() and not (self._processes or self._tells) else 0
        while len(self._in_flight) > behind:
            self._take(self._in_flight[0])
            results.append(self._in_flight.popleft())  # not before: if memory is full, its texts must be found

    def _take(self, step: StepResult) -> None:
        """Give tokens to their tickets, and end those that have a stop token, all their tokens, or no numbers."""
        numbers = step.numbers
        for ticket, row in zip(step.tickets, numbers, strict=True):  # thousands of rows, so this loop does no more
            if ticket.finish_reason is None:
                ticket.rows.append(row)
        stops = np.fromiter(self._stops, dtype=np.int64)
        ends = step.last | np.isin(numbers[:, 0], stops) | (numbers[:, 6] == 0)
        for place in range(len(ends)) if self._watches else np.flatnonzero(ends):
            if step.tickets[place].finish_reason is None:
                self._end(step.tickets[place])

    def _end(self, ticket: Ticket) -> None:
        """End a text if its last token is a stop token, has no numbers, or is the last one that was asked for."""
        request, row = ticket.request, ticket.rows[-1]
        strengths = request.strengths(self.guide)
        if not row[6] and (not strengths or any(strengths)):  # with strengths of 0 it was drawn as without a guide
            ticket.rows.pop()
            self.finish(ticket, "error")
        elif int(row[0]) in request.stops or (request.watch is not None and request.watch(int(row[0]))):
            self.finish(ticket, "stop")
        elif len(ticket.rows) == request.max_new_tokens:
            self.finish(ticket, "length")

    def _go_back(self) -> None:
        """Free all rows after memory was full. Their texts wait again, to go on from their last known tokens.

        Half as many go on together. A text that finds no memory alone, twice at the same token, ends with an error.
        """
        drawn = [ticket for step in self._in_flight for ticket in step.tickets]  # some of whose rows have left
        going = [ticket for ticket in dict.fromkeys([*self.running, *drawn]) if ticket.finish_reason is None]
        joining = [] if self._joining is None else self._joining.tickets
        texts = [*going, *(ticket for ticket in joining if ticket.finish_reason is None)]
        self._wait_again()
        self.waiting.extendleft(reversed(going))
        self._in_flight.clear()  # the tokens in it are drawn again, by the same random numbers
        self.running, self._left = [], np.zeros(0, dtype=np.int64)
        self._calm = 0
        self._look_at_running()
        for ticket in texts:
            ticket.place = None
        if len(texts) == 1:
            if texts[0].stuck == len(texts[0].rows):
                texts[0].error = MemoryLimitError(
                    "the device has no memory for a single text.", "use a smaller dtype, or end other programs on it."
                )
                self.finish(texts[0], "error")
            texts[0].stuck = len(texts[0].rows)
        elif texts:
            _HALVED[self.lm] = len(texts) // 2
            warnings.warn(
                f"the memory is full, so radq decodes {len(texts) // 2} texts at once for some time.", stacklevel=3
            )
        self.decoder.clear()
        vars(self.lm).pop(KEPT, None)
        gc.collect()  # engines and models refer to each other
        empty_cache()


# --- engines that are kept beside their base model for the next call, with their slots and captured steps ---


class _Kept(list[Engine]):
    """Engines beside their base model. Copies of the model, also pickled ones, begin without any."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Kept, ()


def take_engine(lm: Wrappable, guide: Guide | None, batch_size: int | None, compile: bool = False) -> Engine:
    """An engine that was kept, or a new one. One that is taken belongs to the caller alone.

    Captured steps go on reading the tensors that they were captured with. So an engine is used again only if nothing
    has changed since then in the base model and in the guide: neither tensors, nor settings, adapters or hooks.
    """
    if lm.device.type != "cuda" and not compile:
        return Engine(lm, guide, batch_size)
    kept = vars(lm).setdefault(KEPT, _Kept())
    made_with = id(guide), batch_size, compile, describe(lm), describe(guide)
    for engine in kept:
        if engine.made_with == made_with:
            kept.remove(engine)
            return engine
    engine = Engine(lm, guide, batch_size, compile=compile)
    engine.made_with = made_with
    return engine


def keep_engine(engine: Engine) -> None:
    """Keep an engine that has ended all texts, if it has captured or compiled anything."""
    if engine.decoder.captures.on or engine.compile:
        kept = vars(engine.lm).setdefault(KEPT, _Kept())
        kept.append(engine.rest())
        device = engine.lm.device
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        most = max(MOST_BYTES, total // MOST_SHARE)
        while len(kept) > MOST_KEPT or sum(other.nbytes for other in kept) > most:
            kept.pop(0).decoder.clear()  # the caller may still hold the engine
            empty_cache()  # torch keeps the memory of graphs that are gone, and uses it for nothing else
