"""The guides of a decoder. Each follows the rows that ask for it, and no others.

So rows with different sets of guides share the steps of their base model: a guide reads and scores its own rows, and
its shifts are added to these rows alone. Axes: b rows of the decoder, r rows of a guide, k candidates, s strengths.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor

from radq.guides.base import Advice, BaseStates, Guide, Prompts, State, add_advices, leave_out, list_readings
from radq.models.kinds import SIBLINGS_PER_FORWARD
from radq.models.prefill import InTurns, Turn
from radq.models.reading import Reader, Reading
from radq.models.slots import SlotReading
from radq.numerics import Candidates, Strengths, Tokens, enlarge, pad_left

R = TypeVar("R", bound=Sized)
Started = tuple[list[int], State | None]  # the numbers of the prompts that a guide has read, and its state of them


def fill_gaps(staying: Sequence[int]) -> list[int]:
    """Order the rows that stay, so that few move: the last ones take the places of those that leave."""
    known = set(staying)
    movers = [row for row in staying if row >= len(staying)]
    return [place if place in known else movers.pop() for place in range(len(staying))]


def count_siblings(reader: Reader, widest: int | None) -> int:
    """The number of candidates that a model reads beside each other; `widest` is None for the whole vocabulary."""
    return min(SIBLINGS_PER_FORWARD, widest or SIBLINGS_PER_FORWARD) if reader.reads_candidates else 0


class TextStates(Generic[R]):
    """The state of a model or guide after some texts, each of which has a row."""

    def __init__(self, rows: R):
        self.rows = rows
        self.state: State | None = None

    @property
    def readings(self) -> list[Reading]:
        """The readings of models that run for this state alone."""
        return [] if self.state is None else list_readings(self.state)

    @property
    def slots(self) -> list[SlotReading]:
        return [reading for reading in self.readings if isinstance(reading, SlotReading)]

    def resize(self, rows: int) -> None:
        for reading in self.slots:
            reading.resize(rows)

    def add(self, new: State, settle: Callable[[Reading], Reading]) -> None:
        """Add texts behind the others; `settle` moves first readings into slots."""
        self.resize(len(self.rows))
        self.state = new.map_readings(settle) if self.state is None else self.state.join([self.state, new])

    def select(self, order: Sequence[int]) -> None:
        self.resize(len(self.rows))
        if self.state is not None:
            self.state = self.state.select(torch.tensor(order, dtype=torch.long))


class GuideRows(TextStates[list[int]]):
    """A guide, its state of the texts that it follows, and their rows in the decoder."""

    def __init__(self, guide: Guide, base: Callable[[tuple[int, ...]], Tensor], num_tokens: int, device: torch.device):
        """`base` takes outputs of the base model for all rows."""
        super().__init__([])
        self.guide, self.device = guide, device
        self.base = BaseStates(lambda layers: self.take(base(layers)), num_tokens)
        self.reads = any(not reader.base_layers for reader in guide.readers)  # whether it runs transformers of its own
        self.every = True  # whether these are all rows of the decoder, in its order
        self.widest: int | None = None  # the candidates that one of its rows asks for; None for the whole vocabulary
        self.computed = 0  # rows, of which a captured step has some that are not in use
        # the rows in the decoder, counted from 1; 0 for none
        self._targets = torch.zeros(0, dtype=torch.long, device=device)

    # --- rows ---

    def start(self, prompts: Sequence[Sequence[int]], wanted: Iterable[int], turn: Turn) -> InTurns[Started]:
        if not (numbers := sorted(wanted)):
            return numbers, None
        own = pad_left([prompts[number] for number in numbers], device=self.device)
        return numbers, (yield from self.guide.start_in_turns(Prompts(*own, turn, self.base)))

    def join(self, new: State, rows: Iterable[int], settle: Callable[[Reading], Reading]) -> None:
        """Add texts that stand in these rows of the decoder."""
        self.add(new, settle)
        self.rows += rows

    def keep(self, rows: Sequence[int]) -> None:
        """Keep what stands in these rows of the decoder, which will be its rows 0, 1, 2, …"""
        places = {row: place for place, row in enumerate(rows)}
        own = list(rows) if self.every else fill_gaps([place for place, row in enumerate(self.rows) if row in places])
        if own or len(self.slots) == len(self.readings):
            self.select(own)  # empty slots and captured steps stay
        else:
            self.state = None
        self.rows = [places[self.rows[place]] for place in own]

    def place(self, count: int, capacity: int) -> None:
        """Note where the texts stand among so many rows of the decoder, which has room for more."""
        self.every = self.rows == list(range(count))
        if len(self._targets) < capacity:
            self._targets = enlarge(self._targets, capacity)
        if not self.every:
            self._targets.zero_()
            self._targets[: len(self.rows)] = torch.tensor(self.rows, dtype=torch.long) + 1
        self.resize(len(self.rows))

    def resize(self, rows: int) -> None:
        self.computed = rows
        super().resize(rows)

    # --- steps ---

    def take(self, values: Tensor) -> Tensor:
        """Take the guide's rows of those of the decoder."""
        if self.every:
            return values
        return values.index_select(0, (self._targets[: self.computed] - 1).clamp(min=0))

    def spread(self, values: Tensor, like: Candidates) -> Tensor:
        """Put numbers about the guide's candidates where the decoder has them; other places are 0."""
        rows, width = like.shape
        if self.every and values.shape[1] == width:
            return values
        wide = values.new_zeros(rows + 1, width, *values.shape[2:])  # rows that are not in use write to the first one
        targets = torch.arange(1, rows + 1, device=values.device) if self.every else self._targets[: self.computed]
        wide[:, : values.shape[1]].index_copy_(0, targets, values)
        return wide[1:]

    def advise(self, candidates: Candidates, beta: Strengths) -> Advice:
        """Give an opinion on the candidates of the guide's own rows, as many as one of them asks for."""

        def take(values: Tensor) -> Tensor:
            return self.take(values)[:, : self.widest]

        advice = self.guide.advise(self.state, take(candidates), self.take(beta))
        self.state = advice.state
        return spread_advice(advice, lambda values: self.spread(values.to(candidates.device), candidates), take)

    def advance(self, tokens: Tokens) -> None:
        self.state = self.guide.advance(self.state, self.take(tokens))


def spread_advice(advice: Advice, spread: Callable[[Tensor], Tensor], take: Callable[[Tensor], Tensor]) -> Advice:
    """Put an advice on some candidates where a batch has them; `take` takes these out of the batch's numbers."""
    allowed = advice.allowed
    return Advice(
        spread(advice.shift),
        None,
        None if advice.clipped is None else spread(advice.clipped),
        advice.rewards and tuple(map(spread, advice.rewards)),
        None if allowed is None else lambda logits: ~spread(~allowed(take(logits))),
    )


def list_columns(guides: Sequence[Guide]) -> list[slice]:
    ends = accumulate(len(guide.beta) for guide in guides)
    return [slice(end - len(guide.beta), end) for guide, end in zip(guides, ends, strict=True)]


@dataclass(frozen=True)
class Advisers:
    """Guides that advise as their sum does, each on its own rows alone."""

    members: Mapping[int, Callable[[Candidates, Strengths], Advice]]  # those that some row asks for, by their numbers
    columns: Sequence[slice]  # of all guides among the strengths

    def advise(self, state: None, candidates: Candidates, beta: Strengths | None = None) -> Advice:
        assert beta is not None
        advices: dict[int, Advice] = {}
        for number, ask in self.members.items():
            own = beta[:, self.columns[number]]
            advice = ask(candidates, own)
            if len(self.columns) > 1:  # without another guide, rows without numbers are not steered anyway
                advice = replace(advice, shift=leave_out(advice.shift, own))
            advices[number] = advice
        total = add_advices(list(advices.values()))
        if total.rewards is None or len(advices) == len(self.columns):
            return total
        rewards: list[Tensor] = []  # of guides that nobody asks for, too
        for number, columns in enumerate(self.columns):
            if number in advices:
                rewards += advices[number].rewards or ()
            else:
                rewards.append(beta.new_zeros(*candidates.shape, columns.stop - columns.start))
        return replace(total, rewards=tuple(rewards))
