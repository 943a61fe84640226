"""A guide that follows the texts of many requests, which join, leave and start over at any step.

One store of slots holds the guide's state of all texts, whatever their strengths and settings, so that a step is one
forward of each of its models. The store has room for all texts that the engine may run at once, and is planned when
the server starts. On a GPU these forwards are captured as CUDA graphs, for few different numbers of texts.
Axes: b texts, k candidates, s strengths.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from radq.decoding.capture import find_hindrance
from radq.decoding.guide_rows import TextStates, count_siblings, fill_gaps, spread_advice
from radq.errors import DataError
from radq.guides.base import Advice, Guide, list_readings
from radq.models.cuda_graph import StepGraphs
from radq.models.reading import Reader, ValueReading
from radq.models.slots import plan_bytes, settle
from radq.registry.loaded_guides import Selection
from radq.registry.strengths import Guidance

PATIENCE = 16  # steps that a text may miss before it leaves; if it comes back, it is read anew
RESTING = 2**31 - 1  # no model knows this token, and rows whose token is unknown stay as they are
PROMPT_TOKENS = 4096  # of prompts that are read together, with their padding
PADDING = 1.25  # at most so many tokens are read for each token of a prompt


@dataclass(eq=False)  # requests with equal contents are still different requests
class GuidedRequest(ABC):
    """A guided request, whose text the engine extends."""

    guidance: Guidance
    _: KW_ONLY
    end: int = 0  # the token that a request draws which cannot be guided
    stops: tuple[int, ...] = ()  # the tokens that end the text
    ticket: str | None = None  # under which the server asks for figures about it
    choice: int = 0  # its number among the texts with this ticket
    ended: bool = field(default=False, init=False)  # whether it ends, since it cannot be guided
    selection: Selection | None = field(default=None, init=False)  # of the guides that it needs

    @property
    def width(self) -> int:
        """The number of candidates that it asks for."""
        return self.guidance.steering.top_k or sys.maxsize

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of tokens of the text."""

    @abstractmethod
    def tokens(self) -> Int[Tensor, " t"]:
        """Return all tokens of the text."""

    @property
    def last(self) -> int:
        return int(self.tokens()[-1])

    def mark(self) -> Any:
        """Return a value by which `growth` recognises the text later."""
        return self.length

    def growth(self, mark: Any) -> int | None:
        """Return the number of tokens by which the text has grown since it was marked; None if it is another text."""
        return self.length - mark


@dataclass(eq=False)
class HostRequest(GuidedRequest):
    """A request whose tokens the host knows. The engine extends `output` in place."""

    prompt: Sequence[int]
    output: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def last(self) -> int:
        return self.output[-1] if self.output else self.prompt[-1]

    def tokens(self) -> Int[Tensor, " t"]:
        return torch.tensor([*self.prompt, *self.output], dtype=torch.long)

    def mark(self) -> list[int]:
        return list(self.output)

    def growth(self, mark: list[int]) -> int | None:
        return len(self.output) - len(mark) if self.output[: len(mark)] == mark else None


@dataclass(eq=False)
class DeviceRequest(GuidedRequest):
    """A request whose tokens only the device knows. The host knows how many there are."""

    source: Any  # the engine's tokens: `source.gpu` has a row for each slot
    slot: int
    size: int = 0  # the number of tokens

    @property
    def length(self) -> int:
        return self.size

    def tokens(self) -> Int[Tensor, " t"]:
        return self.source.gpu[self.slot, : self.length].long()


@dataclass
class _Followed:
    """A text that a follower has read, and how far."""

    text: GuidedRequest
    mark: Any
    length: int
    missed: int = 0  # steps in a row


class Follower(TextStates[dict[GuidedRequest, int]]):
    """One guide, and its state of the texts that it follows."""

    def __init__(self, guide: Guide, capacity: int, length: int, device: torch.device):
        """The engine runs at most `capacity` texts of `length` tokens at once."""
        super().__init__({})  # the rows of texts, in which they stand in the same order
        self.guide, self.capacity, self.length, self.device = guide, capacity, length, device
        self.reads_candidates = any(reader.reads_candidates for reader in guide.readers)
        self.layout = 0  # changes whenever texts change their rows
        self._followed: list[_Followed] = []
        models = [reader.model for reader in guide.readers]
        captures = device.type == "cuda" and not self.reads_candidates and find_hindrance(models, guide) is None
        self.graphs = StepGraphs(captures)
        self._next = torch.full((capacity,), RESTING, device=device)  # the tokens that a captured step reads
        self._moves: tuple[Any, ...] = (None, None)  # rows that grew, the rows of their tokens, and both as tensors

    # --- memory ---

    @property
    def nbytes(self) -> int:
        """The memory of the store, as far as it may be written."""
        return sum(slots.nbytes for slots in self.slots)

    def plan_bytes(self) -> int:
        """The memory of a store for as many texts as the engine may run."""
        readings = list_readings(self.guide.start(torch.zeros(1, 2, dtype=torch.long, device=self.device)))
        values = (reading for reading in readings if isinstance(reading, ValueReading))
        return sum(plan_bytes(reading, *self._shape(reading.reader)) for reading in values)

    def _shape(self, reader: Reader) -> tuple[int, int, int]:
        """The numbers of texts, of their columns, and of candidates that are read beside each other."""
        return self.capacity, self.length + reader.overhead + 1, count_siblings(reader, None)

    # --- texts ---

    def retain(self, texts: Collection[GuidedRequest]) -> None:
        """Forget all other texts, and give the memory back if none are left."""
        self._keep([row for text, row in self.rows.items() if text in texts])

    def clear(self) -> None:
        """Forget all texts and give their memory back."""
        self.state = None
        self.graphs.clear()
        self._place([])

    def _place(self, followed: list[_Followed]) -> None:
        """Note which texts stand in the rows of the state."""
        self._followed, self.rows = followed, {one.text: row for row, one in enumerate(followed)}
        self.layout += 1

    def _keep(self, rows: list[int]) -> None:
        """Keep the texts in these rows. If there are none, their memory is given back, unless captured steps use it."""
        if len(rows) == len(self.rows):
            return
        if not rows and not self.graphs.on:
            self.clear()
            return
        order = fill_gaps(rows)
        self.select(order)
        self._place([self._followed[row] for row in order])

    @torch.no_grad()
    def follow(
        self, present: Mapping[GuidedRequest, int], last: Tensor | None, widest: int
    ) -> dict[GuidedRequest, Exception]:
        """Bring the state up to date with these texts; return those that cannot be read, and why.

        Where only the device knows their last tokens, these stand in `last`, at the rows that `present` gives.
        """
        grown = self._leave(present)
        if grown:
            self._advance(grown, self._find_tokens(grown, present, last))
        failures: dict[GuidedRequest, Exception] = {}
        for group in _group([text for text in present if text not in self.rows]):
            failures |= self._read(group)
        self._reserve(widest)
        return failures

    def _leave(self, present: Mapping[GuidedRequest, int]) -> list[int]:
        """Let texts leave that are gone, or are others than they were; return the rows of those that have grown."""
        patience = PATIENCE if len({*self.rows, *present}) <= self.capacity else 0
        staying: list[int] = []
        grown: set[GuidedRequest] = set()
        for row, followed in enumerate(self._followed):
            is_present = followed.text in present
            growth = followed.text.growth(followed.mark) if is_present else 0
            followed.missed = 0 if is_present else followed.missed + 1
            if growth in (0, 1) and followed.missed <= patience:
                staying.append(row)
                if growth:
                    grown.add(followed.text)
        self._keep(staying)
        return [row for text, row in self.rows.items() if text in grown]

    def _find_tokens(
        self, rows: list[int], present: Mapping[GuidedRequest, int], last: Tensor | None
    ) -> Int[Tensor, " b"]:
        """The tokens to be read: the last one of the given rows, while all others rest."""
        texts = list(self.rows)
        if last is None:
            tokens = [RESTING] * len(texts)
            for row in rows:
                tokens[row] = texts[row].last
            if min(tokens) < 0:
                raise DataError(
                    "the engine has not told the last token of a text.", "turn asynchronous scheduling off."
                )
            return torch.tensor(tokens, device=self.device)
        sources = [present[texts[row]] for row in rows]
        if self._moves[:2] != (rows, sources):  # else the device knows them already
            self._moves = (rows, sources, *(torch.tensor(part, device=self.device) for part in (rows, sources)))
        into, out_of = self._moves[2:]
        return last.new_full((len(texts),), RESTING, dtype=torch.long).index_copy_(0, into, last[out_of].long())

    def _advance(self, rows: list[int], tokens: Int[Tensor, " b"]) -> None:
        """Read one token in these rows."""
        state: Any = self.state
        if self.reads_candidates and not self._are_candidates(tokens):
            state = state.map_readings(lambda reading: reading.drop_siblings())
        self.state = self._read_next(state, tokens) if self.graphs.on else self.guide.advance(state, tokens)
        for followed in (self._followed[row] for row in rows):
            followed.mark, followed.length = followed.text.mark(), followed.length + 1

    def _read_next(self, state: Any, tokens: Int[Tensor, " b"]) -> Any:
        """Read one token of each text by a captured step. Slots of no text are computed along, and rest."""
        count = self._widen()
        self._next[: len(tokens)] = tokens
        self._next[len(tokens) : count] = RESTING
        shape = (count, *((slots.window, slots.epoch) for slots in self.slots))
        return self.graphs.run(shape, lambda: self.guide.advance(state, self._next[:count]))

    def _widen(self) -> int:
        """Compute some free slots along, so that there are few different numbers of slots; return it."""
        count = min(1 << (len(self.rows) - 1).bit_length(), self.capacity)
        self.resize(count)
        return count

    def _are_candidates(self, tokens: Int[Tensor, " b"]) -> bool:
        """Whether each token is among the candidates that were read; another processor may force one that is not."""
        return all(
            siblings is not None and bool((siblings.match(tokens).any(1) | (tokens == RESTING)).all())
            for siblings in (reading.siblings for reading in self.readings)
        )

    def _read(self, group: Sequence[GuidedRequest]) -> dict[GuidedRequest, Exception]:
        """Read texts from their beginnings, and let them join. If that fails, each is read alone."""
        try:
            state = self._start(group)
        except Exception as error:  # of one text, or for want of memory
            if len(group) == 1:
                return {group[0]: error}
            return {text: error for one in group for text, error in self._read([one]).items()}
        self.add(state, lambda reading: settle(reading, *self._shape(reading.reader)))
        self._place([*self._followed, *(_Followed(text, text.mark(), text.length) for text in group)])
        return {}

    def _start(self, group: Sequence[GuidedRequest]) -> Any:
        """Samples of a prompt have the same text at first, which is read once."""
        texts = [text.tokens() for text in group]
        # Texts on a device are not compared, since that would wait for it.
        keys = [tuple(text.tolist()) if text.device.type == "cpu" else id(text) for text in texts]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        distinct = [*dict(zip(keys, texts, strict=True)).values()]
        input_ids = pad_sequence(distinct, batch_first=True, padding_side="left")
        mask = pad_sequence([torch.ones_like(text) for text in distinct], batch_first=True, padding_side="left")
        state = self.guide.start(input_ids, mask)
        return state if len(distinct) == len(texts) else state.select(torch.tensor([numbers[key] for key in keys]))

    def _bounds(self) -> list[int]:
        """The most tokens that each text may have now."""
        return [followed.length for followed in self._followed]

    def _reserve(self, widest: int) -> None:
        """Make room for the next token of every text, and for candidates that are read beside each other."""
        self.resize(len(self.rows))
        for slots in self.slots:
            bounds = np.array(self._bounds(), dtype=np.int64) + slots.reader.overhead
            slots.bounds[: slots.count] = np.repeat(bounds, slots.copies)
            slots.reserve(siblings=count_siblings(slots.reader, widest))

    # --- candidates ---

    def advise(self, rows: Int[Tensor, " b"], candidates: Int[Tensor, "b k"], beta: Float[Tensor, "b s"]) -> Advice:
        """The guide's opinion on candidates for the next token of the texts in some rows.

        If the guide reads candidates, these must be all rows of texts that go on.
        """
        if not self.reads_candidates:
            assert self.state is not None
            shown = self.state.map_readings(lambda reading: reading.show(rows))
            return self.guide.advise(shown, candidates, beta)
        place = partial(place_rows, rows=rows, count=len(self.rows))
        advice = self.guide.advise(self.state, place(candidates), place(beta))
        self.state = advice.state
        return spread_advice(advice, lambda values: values[rows], place)


def place_rows(values: Tensor, rows: Int[Tensor, " b"], count: int) -> Tensor:
    """Put numbers into these of so many rows; the others are 0."""
    return values.new_zeros(count, *values.shape[1:]).index_copy_(0, rows, values)


def _group(texts: Sequence[GuidedRequest]) -> list[list[GuidedRequest]]:
    """Group the texts that are read together: they have similar lengths, so that little padding is read with them."""
    groups: list[list[GuidedRequest]] = []
    total = 0
    for text in sorted(texts, key=lambda text: text.length, reverse=True):
        padded = (len(groups[-1]) + 1) * groups[-1][0].length if groups else 0
        if not groups or padded > PROMPT_TOKENS or padded > PADDING * (total + text.length):
            groups.append([])
            total = 0
        groups[-1].append(text)
        total += text.length
    return groups
