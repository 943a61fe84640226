"""Guidance under speculative decoding: a request has one row of logits for each drafted token, and one more.

How many drafts were accepted is known on the device alone, so nothing here depends on it. In each step a guide reads
the last token of every text and its drafts from their own positions on, over the drafts of the step before.
Axes: r rows of logits, b texts, n drafted tokens and one more, k candidates, s strengths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from radq.decoding.steering import RowSettings, propose
from radq.errors import OptionError
from radq.guides.base import Advice, Guide, list_readings
from radq.hosts.base_states import ShownFollower
from radq.hosts.batching import Steerer
from radq.hosts.follower import DeviceRequest, Follower, GuidedRequest
from radq.models.reading import OutputReading
from radq.models.slots import SlotReading, takes_slots
from radq.registry.loaded_guides import LoadedGuides


@dataclass(eq=False)
class DraftRequest(DeviceRequest):
    """A request whose length only the device knows."""

    lengths: Any = None  # the engine's: `lengths.gpu` has a number for each slot
    bound: int = field(default=0, init=False)  # the most tokens that the text may have, drafts included

    def growth(self, mark: int) -> int | None:
        return 0  # drafts are read by their positions

    def measure(self) -> None:
        """Find out how long the text is. This waits for the device."""
        self.size = int(self.lengths.gpu[self.slot])


@dataclass(frozen=True)
class Drafts:
    """The rows of logits of a step."""

    slots: Int[Tensor, " r"]  # the slot of each row's request
    places: Int[Tensor, " r"]  # the place of each row among those of its request
    tokens: Int[Tensor, " r"]  # the last token that each row has seen
    positions: Int[Tensor, " r"]  # and its position


def check_drafts(guides: Sequence[Guide], vocab_size: int) -> None:
    """Raise if a guide cannot follow drafts."""
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

    def follow(
        self, present: Mapping[GuidedRequest, int], last: Tensor | None, widest: int
    ) -> dict[GuidedRequest, Exception]:
        for text in present:
            if text not in self.rows and isinstance(text, DraftRequest):
                text.measure()
        return super().follow(present, last, widest)

    def _bounds(self) -> list[int]:
        """Also of drafts, behind which there is room for those that belong to no text."""
        return [max(text.length, getattr(text, "bound", 0)) + self.most for text in self.rows]

    def advise_drafts(
        self, texts: Int[Tensor, " r"], drafts: Drafts, candidates: Int[Tensor, "r k"], beta: Float[Tensor, "r s"]
    ) -> Advice:
        """The guide's opinion on candidates after each row. `texts` are its rows of the texts, or −1."""
        if self._sizes[0] != self.layout:
            self._sizes = (self.layout, torch.tensor([one.length for one in self._followed], device=self.device))
        shown = self._state.map_readings(lambda slots: self._read_over(slots, texts, drafts))
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
    """Steers all rows of logits of guided requests."""

    def __init__(
        self,
        loaded: LoadedGuides,
        capacity: int,
        length: int,
        device: torch.device | str,
        most: int,
        shown: tuple[int, ...] = (),
    ):
        self.most = most
        super().__init__(loaded, capacity, length, device, shown)
        self._table: tuple[Any, Any] = (None, None)

    def _make_follower(self, guide: Guide, length: int) -> DraftFollower:
        return DraftFollower(guide, self.capacity, length, self.device, self.most)

    @torch.inference_mode()
    def steer_drafts(self, logits: Float[Tensor, "r v"], requests: Mapping[int, DraftRequest], drafts: Drafts) -> None:
        """Overwrite the rows of these requests, which are given by their slots, as `steer` does."""
        try:
            self._follow({request: slot for slot, request in requests.items() if not request.ended}, None)
            running = {slot: request for slot, request in requests.items() if not request.ended}
            if running:
                self._steer_rows(logits, self._find_table(running, logits.shape[1]), drafts)
        except Exception as error:
            for follower in self.followers:
                follower.clear()
            self._end(dict.fromkeys(requests.values(), error))
        for slot, request in requests.items():
            if request.ended:
                end = torch.full_like(logits[:1], -torch.inf).index_fill_(1, self._index([request.end]), 0.0)
                logits.copy_(torch.where((drafts.slots == slot)[:, None], end, logits))

    def _find_table(self, requests: Mapping[int, DraftRequest], vocab_size: int) -> "_Table":
        """Return the table of these requests; that of the last step, if nothing has changed since then."""
        key = (tuple(requests.items()), tuple(follower.layout for follower in self.followers))
        if self._table[0] != key:
            self._table = (key, self._make_table(requests, vocab_size))
        return self._table[1]

    def _make_table(self, requests: Mapping[int, DraftRequest], vocab_size: int) -> "_Table":
        listed = list(requests.values())
        texts = {
            number: self._by_slot({one.slot: follower.rows[one] for one in listed if one in follower.rows})
            for number, follower in enumerate(self.followers)
            if follower.rows
        }
        places = self._by_slot({slot: place for place, slot in enumerate(requests)})
        ends = self._index([request.end for request in listed])
        return _Table(places, self._stack(listed, vocab_size), ends, texts)

    def _by_slot(self, numbers: Mapping[int, int]) -> Int[Tensor, " slots"]:
        return self._index([numbers.get(slot, -1) for slot in range(self.capacity)])

    def _steer_rows(self, logits: Float[Tensor, "r v"], table: "_Table", drafts: Drafts) -> None:
        """Compute all rows, and keep those of guided requests: the host does not know which rows these are."""
        slots = drafts.slots.long()
        which = table.places[slots]
        rows = which.clamp(min=0)
        strengths = table.strengths.map(lambda values: values[rows])
        members = [(self.followers[n], texts[slots], self.columns[n]) for n, texts in table.texts.items()]
        proposal = propose(logits.float(), _Members(members, drafts), None, strengths)
        temperature = torch.where(strengths.temperature == 0, 1.0, strengths.temperature)[:, None].float()
        guided = self._write(logits, proposal, temperature, table.ends[rows][:, None])
        logits.copy_(torch.where((which >= 0)[:, None], guided, logits))


@dataclass(frozen=True)
class _Table:
    """The guided requests of a step, on the device, by which all its rows of logits find their own numbers."""

    places: Int[Tensor, " slots"]  # of each slot's request among these, or −1
    strengths: RowSettings  # of these requests
    ends: Int[Tensor, " b"]  # the tokens that end texts which cannot be guided
    texts: dict[int, Int[Tensor, " slots"]]  # for each guide, its row of each slot's text, or −1


@dataclass(frozen=True)
class _Members:
    """The sum of guides, each of which advises on its own rows alone."""

    # The guides that follow some text, with its row for each row of logits, or −1, and the columns of their strengths.
    members: Sequence[tuple[Follower, Int[Tensor, " r"], slice]]
    drafts: Drafts

    def advise(self, state: Any, candidates: Int[Tensor, "r k"], beta: Float[Tensor, "r s"] | None = None) -> Advice:
        assert beta is not None
        shift = torch.zeros(candidates.shape, device=candidates.device)
        for follower, texts, columns in self.members:
            if isinstance(follower, DraftFollower):
                advice = follower.advise_drafts(texts, self.drafts, candidates, beta[:, columns])
            else:
                assert isinstance(follower, ShownFollower)
                advice = follower.advise(None, candidates, beta[:, columns])
            shift = shift + torch.where((texts >= 0)[:, None], advice.shift.to(shift), 0.0)
        return Advice(shift, None)
