"""The guides of a decoder. Each follows the rows that ask for it, and no others.

So rows with different sets of guides share the steps of their base model: a guide reads and scores its own rows, and
its shifts are added to these rows alone. Axes: b rows of the decoder, r rows of a guide, k candidates, s strengths.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from radq.guides.base import Advice, BaseStates, Guide, Prompts, State, SumGuide, add_advices, leave_out, list_readings
from radq.models.prefill import InTurns, Turn
from radq.models.reading import Reading
from radq.models.slots import SlotReading
from radq.numerics import Candidates, Strengths, Tokens


def fill_gaps(staying: Sequence[int]) -> list[int]:
    """Order the rows that stay, so that few move: the last ones take the places of those that leave."""
    known = set(staying)
    movers = [row for row in staying if row >= len(staying)]
    return [place if place in known else movers.pop() for place in range(len(staying))]


class GuideRows:
    """A guide, its state of the texts that it follows, and their rows in the decoder."""

    def __init__(self, guide: Guide, columns: slice, base: Callable[[tuple[int, ...]], Tensor], num_tokens: int):
        """The guide has these columns of all strengths; `base` takes outputs of the base model for all rows."""
        self.guide, self.columns = guide, columns
        self.base = BaseStates(lambda layers: self.take(base(layers)), num_tokens)
        self.reads = any(not reader.base_layers for reader in guide.readers)  # whether it runs transformers of its own
        self.state: State | None = None
        self.rows: list[int] = []
        self.every = True  # whether these are all rows of the decoder, in its order
        self.widest: int | None = None  # the candidates that one of its rows asks for; None for the whole vocabulary
        self.computed = 0  # rows, of which a captured step has some that are not in use
        self._targets = torch.zeros(0, dtype=torch.long)  # the rows in the decoder, counted from 1; 0 for none

    # --- rows ---

    def start(self, input_ids: Int[Tensor, "p t"], attention_mask: Int[Tensor, "p t"], turn: Turn) -> InTurns[State]:
        return self.guide.start_in_turns(Prompts(input_ids, attention_mask, turn, self.base))

    def join(self, new: State, rows: Iterable[int], settle: Callable[[Reading], Reading]) -> None:
        """Add texts that stand in these rows of the decoder; `settle` moves first readings into slots."""
        self.resize(len(self.rows))
        self.state = new.map_readings(settle) if self.state is None else self.state.join([self.state, new])
        self.rows += rows

    def keep(self, rows: Sequence[int]) -> None:
        """Keep what stands in these rows of the decoder, which will be its rows 0, 1, 2, …"""
        self.resize(len(self.rows))
        places = {row: place for place, row in enumerate(rows)}
        own = list(rows) if self.every else fill_gaps([place for place, row in enumerate(self.rows) if row in places])
        if self.state is not None and (own or len(self.slots) == len(self.readings)):
            self.state = self.state.select(torch.tensor(own, dtype=torch.long))  # empty slots and captured steps stay
        else:
            self.state = None
        self.rows = [places[self.rows[place]] for place in own]

    def place(self, count: int, capacity: int, device: torch.device) -> None:
        """Note where the texts stand among so many rows of the decoder, which has room for more."""
        self.every = self.rows == list(range(count))
        if len(self._targets) < capacity:
            self._targets = torch.zeros(capacity, dtype=torch.long, device=device)
        if not self.every:
            self._targets.zero_()
            self._targets[: len(self.rows)] = torch.tensor(self.rows, dtype=torch.long) + 1
        self.resize(len(self.rows))

    def resize(self, rows: int) -> None:
        """Compute so many rows."""
        self.computed = rows
        for reading in self.slots:
            reading.resize(rows)

    @property
    def readings(self) -> list[Reading]:
        """The readings of the guide's own transformers."""
        return [] if self.state is None else list_readings(self.state)

    @property
    def slots(self) -> list[SlotReading]:
        return [reading for reading in self.readings if isinstance(reading, SlotReading)]

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

    def advise(self, candidates: Candidates, beta: Strengths, alone: bool) -> Advice:
        """Give an opinion on the candidates of the guide's own rows, as many as one of them asks for.

        Where there is no other guide, rows without numbers are not steered anyway, and need not be left out.
        """
        own, strengths = self.take(candidates)[:, : self.widest], self.take(beta[:, self.columns])
        advice = self.guide.advise(self.state, own, strengths)
        self.state, allowed = advice.state, advice.allowed

        def spread_allowed(logits: Float[Tensor, "b k"]) -> Bool[Tensor, "b k"]:
            assert allowed is not None
            return ~self.spread(~allowed(self.take(logits)[:, : self.widest]), candidates)

        return Advice(
            self.spread(advice.shift if alone else leave_out(advice.shift, strengths), candidates),
            None,
            None if advice.clipped is None else self.spread(advice.clipped, candidates),
            advice.rewards and tuple(self.spread(part.to(candidates.device), candidates) for part in advice.rewards),
            None if allowed is None else spread_allowed,
        )

    def advance(self, tokens: Tokens) -> None:
        self.state = self.guide.advance(self.state, self.take(tokens))


class Guides:
    """All guides of a decoder, which advise as their sum does."""

    def __init__(self, guide: Guide | None, base: Callable[[tuple[int, ...]], Tensor], num_tokens: int):
        parts = () if guide is None else guide.guides if isinstance(guide, SumGuide) else (guide,)
        self.members: list[GuideRows] = []
        first = 0
        for part in parts:
            last = first + len(part.beta)
            self.members.append(GuideRows(part, slice(first, last), base, num_tokens))
            first = last

    @property
    def active(self) -> list[GuideRows]:
        """The guides that some row asks for; the others cost nothing."""
        return [member for member in self.members if member.rows]

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """The kind of step that the guides need, whatever their strengths are; a captured step holds for one kind."""
        return tuple((member.every, member.widest) if member.rows else None for member in self.members)

    def advise(self, state: None, candidates: Candidates, beta: Strengths | None = None) -> Advice:
        assert beta is not None
        advices = {member: member.advise(candidates, beta, len(self.members) == 1) for member in self.active}
        total = add_advices(list(advices.values()))
        if total.rewards is None or len(advices) == len(self.members):
            return total
        rewards: list[Tensor] = []  # of guides that nobody asks for, too
        for member in self.members:
            if member in advices:
                rewards += advices[member].rewards or ()
            else:
                rewards.append(beta.new_zeros(*candidates.shape, len(member.guide.beta)))
        return replace(total, rewards=tuple(rewards))
