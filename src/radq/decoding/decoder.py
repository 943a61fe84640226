"""The part of decoding that runs on the device: a base model and a guide that continue the same rows of texts.

A step has two halves. `draw` chooses a token for each row and writes it down with numbers about it; `read` lets both
models read these tokens. Neither waits for the device. On a CUDA device both halves are captured as graphs, in which
the base model and the guide read at the same time, on two streams.

Axes: b rows, k candidates, s strengths.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from radq.decoding.capture import Capture, Captures
from radq.decoding.config import Steering
from radq.decoding.guide_rows import Guides
from radq.decoding.request import Request
from radq.decoding.steering import Plan, Proposal, RowSettings, choose, propose
from radq.guides.base import Guide, State
from radq.models.kinds import SIBLINGS_PER_FORWARD
from radq.models.loading import Wrappable, num_logits
from radq.models.prefill import MOST_TOKENS, InTurns, PromptGraphs, Turn, finish
from radq.models.reading import Reader, Reading
from radq.models.readout import join_layers, pick_layers
from radq.models.slots import SlotReading, settle, takes_slots
from radq.models.vocabulary import Vocabulary
from radq.numerics import Tokens, enlarge, log_probabilities, pad_left

Started = tuple[list[int], State | None]  # the numbers of the prompts that a guide has read, and its state of them
Process = Callable[[Float[Tensor, "b v"]], Float[Tensor, "b v"]]

LOGGER = logging.getLogger(__name__)
S = TypeVar("S", bound=State)
COMPILING = 3.0  # seconds; a step that takes longer has compiled something

NUMBERS = ("token", "shift", "kl", "clipped", "log_probability", "guided_log_probability", "finite")


@dataclass(frozen=True)
class Drawn:
    """One token for each row, on the device. Captured steps write into the same tensors again and again."""

    proposal: Proposal
    choice: Tokens  # the index of the chosen candidate
    tokens: Tokens
    numbers: Float[Tensor, "b n"]  # in the order of `NUMBERS`, then the reward behind each strength, if guides tell

    def copy(self, rows: int) -> "Drawn":
        """Copy the first rows into memory of their own, which the next step does not change."""

        def copy(values: Tensor) -> Tensor:
            return values[:rows].clone()

        return Drawn(self.proposal.map(copy), copy(self.choice), copy(self.tokens), copy(self.numbers))


@dataclass(frozen=True)
class Read:
    """Prompts that were read before their rows are added."""

    base: Reading
    states: list[Started]  # of each guide


class Decoder:
    """Rows of texts that a base model and a guide continue together."""

    def __init__(self, lm: Wrappable, guide: Guide | None, captures: bool = True, compile: bool = False):
        self.lm, self.guide = lm, guide
        self.device = lm.device
        asked = () if guide is None else guide.readers
        layers = join_layers([reader.base_layers for reader in asked])
        self.reader = Reader(lm, "logits", "base model", Vocabulary(num_logits(lm)), layers=layers)
        readers = [self.reader, *(reader for reader in asked if not reader.base_layers)]
        models = [reader.model for reader in readers]
        dtypes = [reader.model.dtype for reader in asked] or [torch.float64]
        self._precision = reduce(torch.promote_types, dtypes, torch.float32)  # of β, so that no step has to convert it
        self.captures = Captures(models, guide, captures and self.device.type == "cuda")
        self._prompts = PromptGraphs([reader.model for reader in readers if self.captures.on and takes_slots(reader)])
        self.compile = compile
        self._compiled = {
            reader.model: torch.compile(reader.model.forward, dynamic=False) for reader in readers if compile
        }
        self.base: Reading | None = None
        self.guides = Guides(guide, self._take_states, self.reader.vocabulary.size)
        self.count = 0  # rows
        self._rows: RowSettings | None = None  # of all slots
        self._steerings: list[Steering] = []
        self._plan = Plan.of([])
        self._uniforms = torch.zeros(0, 0, dtype=torch.float64, device=self.device)  # (slots, steps)
        self._done = torch.zeros(0, dtype=torch.long, device=self.device)  # (slots,): tokens drawn
        self._began = 0.0  # when the step in progress began
        self._current: Capture | None = None
        self._tokens: Tensor | None = None  # that were drawn and are still to be read

    # --- rows ---

    def read_ahead(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[int], requests: Sequence[Request], turn: Turn
    ) -> InTurns[Read | None]:
        """Let base model and guides read prompts in turns, which `add` adds; None if they are read by then alone."""
        if self.captures.on and max(map(len, prompts)) * len(prompts) <= MOST_TOKENS:
            return None
        base = yield from self.reader.read_in_turns(*pad_left(prompts, device=self.device), turn)
        states: list[Started] = []
        for number in range(len(self.guides.members)):
            states.append((yield from self._start(number, prompts, rows, requests, turn)))
        return Read(base, states)

    def _start(
        self,
        number: int,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        requests: Sequence[Request],
        turn: Turn,
    ) -> InTurns[Started]:
        """Let a guide read the prompts of the rows that ask for it."""
        places = sorted({row for row, request in zip(rows, requests, strict=True) if request.asks_for(number)})
        if not places:
            return places, None
        own = pad_left([prompts[place] for place in places], device=self.device)
        return places, (yield from self.guides.members[number].start(*own, turn))

    @torch.no_grad()
    def add(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        requests: Sequence[Request],
        uniforms: np.ndarray,
        capacity: int,
        width: int,
        read: Read | None = None,
    ) -> None:
        """Read prompts, and add rows. Each row has the number of its prompt, a request and its random numbers.

        There should be room for `capacity` rows of `width` tokens. `read` is the result of `read_ahead`, if that was
        called.
        """
        steerings = [request.steering for request in requests]
        self._steerings += steerings
        self._plan = Plan.of(self._steerings)
        first, last = self.count, self.count + len(rows)
        turn = Turn(self._prompts if self.captures.on else None)
        if read is None:
            base = finish(self.reader.read_in_turns(*pad_left(prompts, device=self.device), turn))
        else:
            base = read.base
        base = _choose(base, rows, range(len(prompts)), self.device)
        if self.base is None:
            self.base = self._settle(base, capacity, width)
        else:
            self._resize_base(self.count)
            self.base = self.base.join([self.base, base])
        for number, member in enumerate(self.guides.members):
            own = [row for row, request in enumerate(requests) if request.asks_for(number)]
            member.widest = Plan.of(
                [self._steerings[row] for row in [*member.rows, *(first + row for row in own)]]
            ).widest
            if own:  # after the base model has joined: a graph may write to the same memory
                places, state = (
                    read.states[number] if read else finish(self._start(number, prompts, rows, requests, turn))
                )
                assert state is not None
                state = _choose(state, [rows[row] for row in own], places, self.device)
                settle = partial(self._settle, capacity=capacity, width=width, widest=member.widest)
                member.join(state, [first + row for row in own], settle)
        size, betas = self.reader.vocabulary.size, [request.strengths(self.guide) for request in requests]
        stops = [request.stops for request in requests]
        strengths = RowSettings.stack(steerings, betas, size, self.device, self._precision, stops)
        self._grow_rows(max(last, capacity), uniforms.shape[1], strengths)
        assert self._rows is not None
        self._rows.stops[first:last] = -1  # there may be room for more stop tokens than these requests have
        for name, values in strengths.columns.items():
            settings = getattr(self._rows, name)[first:last]
            (settings if values.dim() == 1 else settings[:, : values.shape[1]])[:] = values
        self._uniforms[first:last, : uniforms.shape[1]] = torch.from_numpy(uniforms).to(self.device)
        self._done[first:last] = 0
        self.count = last
        self._place_guides()

    def _place_guides(self) -> None:
        for member in self.guides.members:
            member.place(self.count, self.capacity, self.device)

    def _take_states(self, layers: tuple[int, ...]) -> Float[Tensor, "b n"]:
        """Return the outputs of layers of the base model at the last token of each row, side by side."""
        assert self.base is not None
        assert self.base.notes is not None
        return pick_layers(self.base.notes, self.reader.layers, layers)

    def _siblings(self, reader: Reader, widest: int | None) -> int:
        """Return the number of candidates that a model reads beside each other."""
        return min(SIBLINGS_PER_FORWARD, widest or SIBLINGS_PER_FORWARD) if reader.reads_candidates else 0

    def _resize_base(self, rows: int) -> None:
        if isinstance(self.base, SlotReading):
            self.base.resize(rows)

    def _settle(self, reading: Reading, capacity: int, width: int, widest: int | None = None) -> Reading:
        settled = settle(reading, capacity, width, self._siblings(reading.reader, widest))
        if self.compile and isinstance(settled, SlotReading):
            settled.compiled = self._compiled[reading.reader.model]
        return settled

    def _grow_rows(self, capacity: int, steps: int, like: RowSettings) -> None:
        """Make the tensors of settings, stop tokens and random numbers large enough."""
        before, n = self._rows or like, self.count
        held = (0, 0, 0) if self._rows is None else (self.capacity, self._uniforms.shape[1], before.stops.shape[1])
        capacity, steps, ends = map(max, held, (capacity, steps, like.stops.shape[1]))
        if self._rows is None or (capacity, steps, ends) != held:
            self._rows = replace(
                before.map(lambda values: enlarge(values[:n], capacity, *values.shape[1:])),
                stops=enlarge(before.stops[:n], capacity, ends, fill=-1),
                temperature=enlarge(before.temperature[:n], capacity, fill=1),
                top_k=enlarge(before.top_k[:n], capacity, fill=1),
            )
            self._uniforms = enlarge(self._uniforms[:n], capacity, steps)
            self._done = enlarge(self._done[:n], capacity)
            self.captures.clear()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. Rows that keep their places are not copied."""
        index = torch.tensor(rows, dtype=torch.long)
        self._resize_base(self.count)
        for member in self.guides.members:
            member.keep(rows)
        assert self.base is not None
        assert self._rows is not None
        self.base = self.base.select(index)
        index = index.to(self.device)
        for values in (*vars(self._rows).values(), self._uniforms, self._done):
            if isinstance(values, Tensor):
                values[: len(rows)] = values[index]
        self._steerings = [self._steerings[row] for row in rows]
        self.count = len(rows)
        if self._tokens is not None:
            self._tokens = self._tokens[index]
        self._place_guides()

    @property
    def may_leave(self) -> bool:
        """Whether rows may leave between the halves of a step; a captured or compiled step has them all."""
        return self.device.type == "cpu" and not self.compile

    def empty(self) -> None:
        """Forget all rows. Slots stay for others, and captured steps with them."""
        if not self._in_slots:
            self.clear()
            return
        for member in self.guides.members:
            member.keep([])
        if isinstance(self.base, SlotReading):
            self.base.resize(self.count).select(torch.zeros(0, dtype=torch.long))
        self._steerings, self.count = [], 0
        self._place_guides()

    def clear(self) -> None:
        """Forget all rows and give their memory back."""
        self.__init__(self.lm, self.guide, self.captures.on, self.compile)

    @property
    def capacity(self) -> int:
        """The number of rows for which there is room."""
        return len(self._done)

    @property
    def nbytes(self) -> int:
        """The memory that the slots hold."""
        return sum(reading.nbytes for reading in self.slots)

    # --- steps ---

    @property
    def _readings(self) -> list[Reading]:
        base = [] if self.base is None else [self.base]
        return [*base, *(reading for member in self.guides.members for reading in member.readings)]

    @property
    def _in_slots(self) -> bool:
        """Whether all models work with slots."""
        return len(self.slots) == len(self._readings)

    @property
    def slots(self) -> list[SlotReading]:
        """The readings in slots; a model that cannot work with them has none."""
        return [reading for reading in self._readings if isinstance(reading, SlotReading)]

    @torch.no_grad()
    def draw(self, alive: np.ndarray, process: Process | None = None) -> Drawn:
        """Choose the next token of each row; `process` changes the base model's logits before candidates are chosen.

        Rows that are not `alive` are computed along, and may hold anything.
        """
        self._began = time.perf_counter()
        captured = self.captures.on and self._in_slots and process is None
        rows = self._count_rows(captured)
        self._reserve(rows, alive, all_rows=captured or (self.compile and self._in_slots))
        self._current = None
        if captured:
            active = [reading for member in self.guides.active for reading in member.slots]
            shape = (rows, *((reading.window, reading.epoch) for reading in [self.base, *active]))
            kind = (self._plan, self.guides.kind, shape if self.compile else None)  # compiled in its first step

            def capture() -> Capture[Drawn]:
                return self.captures.capture(
                    lambda: self._draw(rows), lambda drawn, side: self._read(drawn.tokens, side)
                )

            self._current = self.captures.find(kind, shape, capture)
        if self._current is None:
            drawn = self._draw(rows, process)
        else:
            self._current.draw.replay()
            drawn = self._current.drawn
            self.captures.count(self._current, self.count / rows)
        self._tokens = drawn.tokens
        return drawn

    def _reserve(self, rows: int, alive: np.ndarray, all_rows: bool) -> None:
        """Make room for a token of every row. Guides compute as many rows as the base model where steps are captured,
        so that the number of rows that ask for each makes no further shapes.
        """
        if isinstance(self.base, SlotReading):
            self.base.make_room(self.count, rows).reserve(alive)
        for member in self.guides.active:
            texts = len(member.rows)
            member.resize(rows if all_rows else texts)
            for reading in member.slots:
                reading.make_room(texts, member.computed)
                reading.reserve(
                    alive if member.every else alive[member.rows], self._siblings(reading.reader, member.widest)
                )

    @torch.no_grad()
    def read(self) -> None:
        """Let both models read the tokens that were drawn."""
        assert self._tokens is not None
        if self._current is not None:
            self._current.read.replay()
        else:
            self._read(self._tokens)
            seconds = time.perf_counter() - self._began
            if self.compile and seconds > COMPILING:  # in the first step of a shape
                took = "torch.compile took %.0f s; the next %d texts at once take none."
                LOGGER.warning(took, seconds, self.capacity)
        self._tokens = None

    def _count_rows(self, captured: bool) -> int:
        """Choose the number of rows to compute; each number that must be captured or compiled is one of few."""
        if self.compile and self._in_slots:
            return self.capacity
        if not captured:
            return self.count
        step = max(1, 2 ** (self.count.bit_length() - 1) // 16)
        return min(-(-self.count // step) * step, self.capacity)

    def _draw(self, rows: int, process: Process | None = None) -> Drawn:
        assert self._rows is not None
        assert self.base is not None
        strengths = self._rows.map(lambda values: values[:rows], self._plan)
        logits = self.base.last
        guides = self.guides if self.guides.active else None
        proposal = propose(logits if process is None else process(logits), guides, None, strengths)
        done = self._done[:rows]
        place = done.clamp(max=self._uniforms.shape[1] - 1)[:, None]
        choice = choose(proposal, strengths, self._uniforms[:rows].gather(1, place).squeeze(1))
        tokens = proposal.candidates.gather(1, choice[:, None]).squeeze(1)
        done.add_(1)
        numbers = _measure(proposal, choice, tokens, logits, guides is not None)
        return Drawn(proposal, choice, tokens, numbers)

    def _read(self, tokens: Tokens, side: torch.cuda.Stream | None = None) -> None:
        """Read one token per row; the guide reads on another stream where one is given."""
        assert self.base is not None
        guides = self.guides.active
        if side is None or not any(member.reads for member in guides):
            self.base = self.base.read(tokens)
            for member in guides:
                member.advance(tokens)
        else:
            before = [reading.siblings for member in guides for reading in member.readings]  # memory that is still read
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for member in guides:
                    member.advance(tokens)
            self.base = self.base.read(tokens)
            torch.cuda.current_stream().wait_stream(side)
            del before


def _choose(state: S, wanted: Sequence[int], held: Sequence[int], device: torch.device) -> S:
    """Take rows of a state, in the order in which they are wanted, and maybe several times."""
    if list(wanted) == list(held):
        return state
    places = {number: place for place, number in enumerate(held)}
    return state.select(torch.tensor([places[number] for number in wanted], device=device))


def _measure(
    proposal: Proposal, choice: Tokens, tokens: Tokens, logits: Float[Tensor, "b v"], guided: bool
) -> Float[Tensor, "b n"]:
    """Compute the numbers about each token; log-probabilities are those of the base model alone and of the candidates.

    All of them are exact in float32: no vocabulary has more than 2²⁴ tokens.
    """
    shift = proposal.shift.gather(1, choice[:, None]).squeeze(1)
    columns = (
        tokens,
        shift,
        proposal.kl if guided else shift,  # without a guide, both are 0
        proposal.clipped,
        log_probabilities(logits, tokens),
        proposal.log_probabilities.gather(1, choice[:, None]).squeeze(1),
        proposal.finite,
    )
    parts = [column[:, None] for column in columns]
    for part in proposal.rewards or ():  # (b, k, s)
        index = choice.to(part.device)[:, None, None].expand(-1, 1, part.shape[2])
        parts.append(part.gather(1, index).squeeze(1))
    return torch.cat([part.to(proposal.base) for part in parts], dim=1)
