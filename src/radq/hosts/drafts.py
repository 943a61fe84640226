"""Guidance under speculative decoding: a request has one row of logits for each drafted token, and one more.

How many drafts were accepted is known on the device alone, so nothing here depends on it. In each step a guide reads
the last token of every text and its drafts from their own positions on, over the drafts of the step before.
Axes: r rows of logits, b texts, n drafted tokens and one more, k candidates, s strengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from radq.decoding.guide_rows import Advisers
from radq.decoding.steering import RowSettings, propose
from radq.errors import OptionError
from radq.guides.base import Advice, Guide, list_readings
from radq.hosts.base_states import ShownFollower
from radq.hosts.batching import Steerer
from radq.hosts.follower import DeviceRequest, Follower, GuidedRequest
from radq.models.reading import OutputReading
from radq.models.slots import SlotReading, takes_slots
from radq.numerics import Candidates, Strengths

# The guided requests of a step, on the device, by which all its rows of logits find their own numbers: the place of
# each slot's request among these, or −1; their settings; the tokens that end them; and for each guide, its row of each
# slot's text, or −1.
_Table = tuple[Tensor, RowSettings, Tensor, dict[int, Tensor]]


@dataclass(eq=False)
class DraftRequest(DeviceRequest):
    """A request whose length only the device knows; `size` is the most tokens that it may have, drafts included."""

    lengths: Any = None  # the engine's: `lengths.gpu` has a number for each slot

    @property
    def length(self) -> int:
        return int(self.lengths.gpu[self.slot])  # this waits for the device

    def growth(self, mark: int) -> int | None:
        return 0  # drafts are read by their positions


@dataclass(frozen=True)
class Drafts:
    """The rows of logits of a step."""

    slots: Int[Tensor, " r"]  # the slot of each row's request
    places: Int[Tensor, " r"]  # the place of each row among those of its request
    tokens: Int[Tensor, " r"]  # the last token that each row has seen
    positions: Int[Tensor, " r"]  # and its position


def check_drafts(guides: Sequence[Guide], vocab_size: int) -> None:
    for guide in guides:
        state = guide.start(torch.zeros(1, 2, dtype=torch.long))
        noted = [reading.notes is not None for reading in list_readings(state)]
        for reader in guide.readers:
            if any(noted) or reader.reads_candidates or reader.num_known < vocab_size or not takes_slots(reader):
                raise OptionError(
                    "a guide cannot be used with speculative decoding.",
                    "use RAD-Q or DExperts models that know all tokens of the base model, or turn speculation off.",
                )


class DraftFollower(Follower):
    """One guide, which reads the drafts of all its texts in each step."""

    def __init__(self, guide: Guide, capacity: int, length: int, device: torch.device, most: int):
        """`most` is the largest number of rows of logits that a request may have."""
        super().__init__(guide, capacity, length + 2 * most, device)
        self.most = most
        # What a step reads, and from which columns on; the last row takes what belongs to no text.
        self._tokens = torch.zeros(capacity + 1, most, dtype=torch.long, device=device)
        self._starts = torch.zeros(capacity + 1, dtype=torch.long, device=device)
        self._sizes: tuple[int, Any] = (-1, None)  # the lengths of the texts when they were read, for one layout

    def _bounds(self) -> list[int]:
        """Also of drafts, behind which there is room for those that belong to no text."""
        return [max(one.length, getattr(one.text, "size", 0)) + self.most for one in self._followed]

    def advise_drafts(
        self, texts: Int[Tensor, " r"], drafts: Drafts, candidates: Int[Tensor, "r k"], beta: Float[Tensor, "r s"]
    ) -> Advice:
        """The guide's opinion on candidates after each row. `texts` are its rows of the texts, or −1."""
        if self._sizes[0] != self.layout:
            self._sizes = (self.layout, torch.tensor([one.length for one in self._followed], device=self.device))
        state: Any = self.state
        shown = state.map_readings(lambda slots: self._read_over(slots, texts, drafts))
        return self.guide.advise(shown, candidates, beta)

    def _read_over(self, slots: SlotReading, texts: Int[Tensor, " r"], drafts: Drafts) -> OutputReading:
        """Let a model read the drafts of all texts; return its output at each row of logits."""
        places, followed = drafts.places.long(), texts >= 0
        before = slots.lengths[: len(self.rows)] - self._sizes[1]  # a BOS may stand before a text
        columns = drafts.positions.long() + before[texts.clamp(min=0)]
        self._tokens.zero_()
        self._tokens[torch.where(followed, texts, self.capacity), places] = drafts.tokens.long()
        self._starts.fill_(slots.window - self.most)  # texts that are not shown keep what they have
        self._starts[torch.where(followed & (places == 0), texts, self.capacity)] = columns
        count = self._widen() if self.graphs.on else slots.count
        outputs = self.graphs.run(
            (id(slots), count, slots.window, slots.epoch),
            lambda: slots.read_over(self._tokens[:count], self._starts[:count]),
        )
        chosen = outputs[texts.clamp(min=0), places]
        return OutputReading(slots.reader, lambda: chosen)


class DraftSteerer(Steerer):
    """Steers all rows of logits of guided requests, which `steer` takes by their slots, together with the drafts."""

    def __init__(self, *settings: Any, most: int):
        """The settings are those of other steerers; a request has at most so many rows of logits."""
        super().__init__(*settings, make=partial(DraftFollower, most=most))
        self._table: tuple[Any, Any] = (None, None)

    def _steer(self, logits: Float[Tensor, "r v"], requests: Mapping[int, Any], tokens: Drafts) -> None:
        """Steer the rows of requests, which are given by their slots.

        All rows are computed, and those of guided requests are kept: the host does not know which rows these are.
        """
        running = self._follow(requests, None)
        if not running:
            return
        places, every, ends, texts = self._find_table(running, logits.shape[1])
        slots = tokens.slots.long()
        which = places[slots]
        rows = which.clamp(min=0)
        settings = every.map(lambda values: values[rows])
        members = {number: partial(self._advise, number, own[slots], tokens) for number, own in texts.items()}
        guides = Advisers(members, self.columns) if members else None
        proposal = propose(logits.float(), guides, None, settings)
        guided = self._write(logits, proposal, settings, ends[rows][:, None])
        logits.copy_(torch.where((which >= 0)[:, None], guided, logits))

    def _advise(
        self, number: int, texts: Int[Tensor, " r"], drafts: Drafts, candidates: Candidates, beta: Strengths
    ) -> Advice:
        """Ask a guide about all rows of logits. `texts` are its rows of their texts, or −1 where it has none."""
        follower = self.followers[number]
        if isinstance(follower, DraftFollower):
            advice = follower.advise_drafts(texts, drafts, candidates, beta)
        else:
            assert isinstance(follower, ShownFollower)
            advice = follower.advise(None, candidates, beta)
        return replace(advice, shift=torch.where((texts >= 0)[:, None], advice.shift, 0.0))

    def _write_end(self, logits: Float[Tensor, "r v"], row: int, end: int, tokens: Drafts) -> None:
        ended = torch.full_like(logits[:1], -torch.inf).index_fill_(1, self._index([end]), 0.0)
        logits.copy_(torch.where((tokens.slots == row)[:, None], ended, logits))

    def _find_table(self, requests: Mapping[int, GuidedRequest], vocab_size: int) -> _Table:
        """Return the table of these requests; that of the last step, if nothing has changed since then."""
        key = (tuple(requests.items()), tuple(follower.layout for follower in self.followers))
        if self._table[0] != key:
            listed = list(requests.values())
            texts = {
                number: self._by_slot(
                    {slot: follower.rows[one] for slot, one in requests.items() if one in follower.rows}
                )
                for number, follower in enumerate(self.followers)
                if follower.rows
            }
            places = self._by_slot({slot: place for place, slot in enumerate(requests)})
            ends = self._index([request.end for request in listed])
            self._table = (key, (places, self._stack(listed, vocab_size), ends, texts))
        return self._table[1]

    def _by_slot(self, numbers: Mapping[int, int]) -> Int[Tensor, " slots"]:
        return self._index([numbers.get(slot, -1) for slot in range(self.capacity)])
