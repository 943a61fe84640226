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
from radq.decoding.guide_rows import Advisers, GuideRows, Started, TextStates, count_siblings, list_columns
from radq.decoding.request import Request
from radq.decoding.steering import Plan, Proposal, RowSettings, choose, propose
from radq.guides.base import Guide, State, SumGuide
from radq.models.loading import Wrappable, num_logits
from radq.models.prefill import MOST_TOKENS, InTurns, PromptGraphs, Turn, finish
from radq.models.reading import Reader, Reading
from radq.models.readout import join_layers, pick_layers
from radq.models.slots import SlotReading, settle, takes_slots
from radq.models.vocabulary import Vocabulary
from radq.numerics import Tokens, enlarge, log_probabilities, pad_left

Read = tuple[Reading, list[Started]]  # what base model and guides know of prompts whose rows are still to be added
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

    def map(self, change: Callable[[Tensor], Tensor]) -> "Drawn":
        """Return the same tokens with changed tensors, such as some of their rows."""
        return Drawn(self.proposal.map(change), *map(change, (self.choice, self.tokens, self.numbers)))


class Decoder:
    """Rows of texts that a base model and a guide continue together."""

    def __init__(self, lm: Wrappable, guide: Guide | None, captures: bool = True, compile: bool = False):
        self.lm, self.guide = lm, guide
        self.device = lm.device
        asked = () if guide is None else guide.readers
        layers = join_layers([reader.base_layers for reader in asked])
        self.reader = Reader(lm, "logits", "base model", Vocabulary(num_logits(lm)), layers=layers)
        readers = [self.reader, *(reader for reader in asked if not reader.base_layers)]
        dtypes = [reader.model.dtype for reader in asked] or [torch.float64]
        self._precision = reduce(torch.promote_types, dtypes, torch.float32)  # of β, so that no step has to convert it
        self.captures = Captures([reader.model for reader in readers], guide, captures and self.device.type == "cuda")
        self._prompts = PromptGraphs([reader.model for reader in readers if self.captures.on and takes_slots(reader)])
        self.compile = compile
        self._compiled = {
            reader.model: torch.compile(reader.model.forward, dynamic=False) for reader in readers if compile
        }
        self.base = TextStates(range(0))
        parts = () if guide is None else guide.guides if isinstance(guide, SumGuide) else (guide,)
        self.members = [GuideRows(part, self._take_states, self.reader.vocabulary.size, self.device) for part in parts]
        self._columns = list_columns(parts)
        # Of all slots; there are none yet.
        beta, size = () if guide is None else guide.beta, self.reader.vocabulary.size
        self._rows = RowSettings.stack([Steering()], [beta], size, self.device, self._precision).map(
            lambda row: row[:0]
        )
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
        for number, member in enumerate(self.members):
            wanted = {row for row, request in zip(rows, requests, strict=True) if request.asks_for(number)}
            states.append((yield from member.start(prompts, wanted, turn)))
        return base, states

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
        base = read[0] if read else finish(self.reader.read_in_turns(*pad_left(prompts, device=self.device), turn))
        base = _choose(base, rows, range(len(prompts)), self.device)
        self.base.add(base, partial(self._settle, capacity=capacity, width=width))
        for number, member in enumerate(self.members):
            own = [row for row, request in enumerate(requests) if request.asks_for(number)]
            joining = [first + row for row in own]
            member.widest = Plan.of([self._steerings[row] for row in [*member.rows, *joining]]).widest
            if own:  # after the base model has joined: a graph may write to the same memory
                wanted = {rows[row] for row in own}
                places, state = read[1][number] if read else finish(member.start(prompts, wanted, turn))
                assert state is not None
                state = _choose(state, [rows[row] for row in own], places, self.device)
                settle = partial(self._settle, capacity=capacity, width=width, widest=member.widest)
                member.join(state, joining, settle)
        size, betas = self.reader.vocabulary.size, [request.strengths(self.guide) for request in requests]
        stops = [request.stops for request in requests]
        strengths = RowSettings.stack(steerings, betas, size, self.device, self._precision, stops)
        self._grow_rows(max(last, capacity), uniforms.shape[1], strengths.stops.shape[1])
        self._rows.stops[first:last] = -1  # there may be room for more stop tokens than these requests have
        for name, values in strengths.columns.items():
            settings = getattr(self._rows, name)[first:last]
            (settings if values.dim() == 1 else settings[:, : values.shape[1]])[:] = values
        self._uniforms[first:last, : uniforms.shape[1]] = torch.from_numpy(uniforms).to(self.device)
        self._done[first:last] = 0
        self.base.rows = range(last)
        self._place_guides()

    def _place_guides(self) -> None:
        for member in self.members:
            member.place(self.count, self.capacity)

    def _take_states(self, layers: tuple[int, ...]) -> Float[Tensor, "b n"]:
        """Return the outputs of layers of the base model at the last token of each row, side by side."""
        assert self._base_reading.notes is not None
        return pick_layers(self._base_reading.notes, self.reader.layers, layers)

    @property
    def _base_reading(self) -> Reading:
        """The base model's reading of all texts."""
        (reading,) = self.base.readings
        return reading

    def _settle(self, reading: Reading, capacity: int, width: int, widest: int | None = None) -> Reading:
        settled = settle(reading, capacity, width, count_siblings(reading.reader, widest))
        if self.compile and isinstance(settled, SlotReading):
            settled.compiled = self._compiled[reading.reader.model]
        return settled

    def _grow_rows(self, *wanted: int) -> None:
        """Make the tensors large enough for so many rows, random numbers of each, and stop tokens of each."""
        before, n = self._rows, self.count
        held = self.capacity, self._uniforms.shape[1], before.stops.shape[1]
        capacity, steps, ends = map(max, held, wanted)
        if (capacity, steps, ends) != held:
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
        """Keep these rows, in this order. Rows that keep their places are not copied.

        If there are none, slots stay for others, and captured steps with them.
        """
        if not (rows or self._in_slots):
            self.clear()
            return
        for member in self.members:
            member.keep(rows)
        self.base.select(rows)
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        for values in (*self._rows.columns.values(), self._uniforms, self._done):
            values[: len(rows)] = values[index]
        self._steerings = [self._steerings[row] for row in rows]
        self.base.rows = range(len(rows))
        if self._tokens is not None:
            self._tokens = self._tokens[index]
        self._place_guides()

    @property
    def may_leave(self) -> bool:
        """Whether rows may leave between the halves of a step; a captured or compiled step has them all."""
        return self.device.type == "cpu" and not self.compile

    def clear(self) -> None:
        """Forget all rows and give their memory back."""
        self.__init__(self.lm, self.guide, self.captures.on, self.compile)

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.base.rows)

    @property
    def capacity(self) -> int:
        """The number of rows for which there is room."""
        return len(self._done)

    @property
    def nbytes(self) -> int:
        return sum(reading.nbytes for reading in self.slots)

    # --- steps ---

    @property
    def _readings(self) -> list[Reading]:
        return [reading for texts in (self.base, *self.members) for reading in texts.readings]

    @property
    def _active(self) -> list[GuideRows]:
        """The guides that some row asks for; the others cost nothing."""
        return [member for member in self.members if member.rows]

    @property
    def _in_slots(self) -> bool:
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
            slots = [reading for texts in (self.base, *self._active) for reading in texts.slots]
            shape = (rows, *((reading.window, reading.epoch) for reading in slots))
            # A captured step holds for guides whose rows need the same work, whatever their strengths are.
            needs = tuple((member.every, member.widest) if member.rows else None for member in self.members)
            kind = (self._plan, needs, shape if self.compile else None)  # compiled in its first step
            halves = partial(self._draw, rows), lambda drawn, side: self._read(drawn.tokens, side)
            self._current = self.captures.find(kind, shape, partial(self.captures.capture, *halves))
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
        for reading in self.base.slots:
            reading.make_room(self.count, rows).reserve(alive)
        for member in self._active:
            texts = len(member.rows)
            member.resize(rows if all_rows else texts)
            for reading in member.slots:
                reading.make_room(texts, member.computed)
                own = alive if member.every else alive[member.rows]
                reading.reserve(own, count_siblings(reading.reader, member.widest))

    @torch.no_grad()
    def read(self, tokens: Tokens | None = None) -> None:
        """Let both models read the tokens that were drawn, or others in their place if steps are not captured."""
        if tokens is not None:
            for reading in self.slots:
                reading.drop_siblings()  # among which they need not be
        tokens = self._tokens if tokens is None else tokens
        assert tokens is not None
        if self._current is not None:
            self._current.read.replay()
        else:
            self._read(tokens)
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
        strengths = self._rows.map(lambda values: values[:rows], self._plan)
        logits = self._base_reading.last
        members = {number: member.advise for number, member in enumerate(self.members) if member.rows}
        advisers = Advisers(members, self._columns) if members else None
        proposal = propose(logits if process is None else process(logits), advisers, None, strengths)
        done = self._done[:rows]
        place = done.clamp(max=self._uniforms.shape[1] - 1)[:, None]
        choice = choose(proposal, strengths, self._uniforms[:rows].gather(1, place).squeeze(1))
        tokens = proposal.candidates.gather(1, choice[:, None]).squeeze(1)
        done.add_(1)
        numbers = _measure(proposal, choice, tokens, logits)
        return Drawn(proposal, choice, tokens, numbers)

    def _read(self, tokens: Tokens, side: torch.cuda.Stream | None = None) -> None:
        """Read one token per row; the guide reads on another stream where one is given."""
        guides = self._active
        if side is None or not any(member.reads for member in guides):
            self.base.state = self._base_reading.read(tokens)
            for member in guides:
                member.advance(tokens)
        else:
            before = [reading.siblings for member in guides for reading in member.readings]  # memory that is still read
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for member in guides:
                    member.advance(tokens)
            self.base.state = self._base_reading.read(tokens)
            torch.cuda.current_stream().wait_stream(side)
            del before


def _choose(state: S, wanted: Sequence[int], held: Sequence[int], device: torch.device) -> S:
    """Take rows of a state, in the order in which they are wanted, and maybe several times."""
    if list(wanted) == list(held):
        return state
    places = {number: place for place, number in enumerate(held)}
    return state.select(torch.tensor([places[number] for number in wanted], device=device))


def _measure(proposal: Proposal, choice: Tokens, tokens: Tokens, logits: Float[Tensor, "b v"]) -> Float[Tensor, "b n"]:
    """Compute the numbers about each token; log-probabilities are those of the base model alone and of the candidates.

    All of them are exact in float32: no vocabulary has more than 2²⁴ tokens.
    """
    shift = proposal.shift.gather(1, choice[:, None]).squeeze(1)
    columns = (
        tokens,
        shift,
        proposal.kl if proposal.steered else shift,  # without a guide, both are 0
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
