"""A guide that follows the texts of many requests, which join, leave and start over at any step.

One store of slots holds the guide's state of all texts, whatever their strengths and settings, so that a step is one
forward of each of its models. The store has room for all texts that the engine may run at once, and is planned when
the server starts. On a GPU these forwards are captured as CUDA graphs, for few different numbers of texts.
Axes: b texts, k candidates, s strengths.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from radq.decoding.capture import find_hindrance
from radq.errors import DataError
from radq.guides import Guide
from radq.guides.base import Advice, list_readings
from radq.models.cuda_graph import StepGraphs
from radq.models.kinds import SIBLINGS_PER_FORWARD
from radq.models.reading import Reader, Reading, ValueReading
from radq.models.slots import SlotReading, plan_bytes, settle

PATIENCE = 16  # steps that a text may miss before it leaves; if it comes back, it is read anew
RESTING = 2**31 - 1  # no model knows this token, and rows whose token is unknown stay as they are
PROMPT_TOKENS = 4096  # of prompts that are read together, with their padding
PADDING = 1.25  # at most so many tokens are read for each token of a prompt


class Text(ABC):
    """A text that an engine extends."""

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of tokens of the text."""

    @property
    @abstractmethod
    def last(self) -> int:
        """The last token of the text."""

    @abstractmethod
    def tokens(self) -> Int[Tensor, " t"]:
        """Return all tokens of the text."""

    @abstractmethod
    def mark(self) -> Any:
        """Return a value by which `growth` recognises the text later."""

    @abstractmethod
    def growth(self, mark: Any) -> int | None:
        """Return the number of tokens by which the text has grown since it was marked; None if it is another text."""


class Follower:
    """One guide, and its state of the texts that it follows."""

    def __init__(self, guide: Guide, capacity: int, length: int, device: torch.device):
        """The engine runs at most `capacity` texts of `length` tokens at once."""
        self.guide, self.capacity, self.length, self.device = guide, capacity, length, device
        self.reads_candidates = any(reader.reads_candidates for reader in guide.readers)
        self.layout = 0  # changes whenever texts change their rows
        self.texts: list[Text] = []  # in the order of the state's rows
        self.rows: dict[Text, int] = {}
        self._marks: list[Any] = []
        self._lengths: list[int] = []
        self._missed: list[int] = []
        self._state: Any = None
        models = [reader.model for reader in guide.readers]
        captures = device.type == "cuda" and not self.reads_candidates and find_hindrance(models, guide) is None
        self.graphs = StepGraphs(captures)
        self._next = torch.full((capacity,), RESTING, device=device)  # the tokens that a captured step reads
        self._moves: tuple[Any, ...] = (None, None)  # rows that grew, the places of their tokens, and both as tensors

    # --- memory ---

    @property
    def nbytes(self) -> int:
        """The memory of the store, as far as it may be written."""
        return sum(slots.nbytes for slots in self._slots())

    def plan_bytes(self) -> int:
        """The memory of a store for as many texts as the engine may run."""
        readings = list_readings(self.guide.start(torch.zeros(1, 2, dtype=torch.long, device=self.device)))
        values = (reading for reading in readings if isinstance(reading, ValueReading))
        return sum(plan_bytes(reading, *self._shape(reading.reader)) for reading in values)

    def _shape(self, reader: Reader) -> tuple[int, int, int]:
        """The numbers of texts, of their columns, and of candidates that are read beside each other."""
        siblings = SIBLINGS_PER_FORWARD if reader.reads_candidates else 0
        return self.capacity, self.length + reader.overhead + 1, siblings

    def _slots(self) -> list[SlotReading]:
        readings = [] if self._state is None else list_readings(self._state)
        return [reading for reading in readings if isinstance(reading, SlotReading)]

    # --- texts ---

    def retain(self, texts: Iterable[Text]) -> None:
        """Forget all other texts, and give the memory back if none are left."""
        staying = set(texts)
        self._keep([row for row, text in enumerate(self.texts) if text in staying])

    def clear(self) -> None:
        """Forget all texts and give their memory back."""
        self._state = None
        self.graphs.clear()
        self._forget_texts()

    def _forget_texts(self) -> None:
        self.texts, self._marks, self._lengths, self._missed, self.rows = [], [], [], [], {}
        self.layout += 1

    def _empty(self) -> None:
        """Forget all texts. Their memory is given back, but not where captured steps use it."""
        if not self.graphs.on:
            self.clear()
            return
        for slots in self._slots():
            slots.resize(len(self.texts)).select(torch.zeros(0, dtype=torch.long))
        self._forget_texts()

    def _keep(self, rows: list[int]) -> None:
        """Move the last rows into the places of those that leave, so that few are copied."""
        if len(rows) == len(self.texts):
            return
        if not rows:
            self._empty()
            return
        staying = set(rows)
        movers = [row for row in rows if row >= len(rows)]
        order = [place if place in staying else movers.pop() for place in range(len(rows))]
        for slots in self._slots():
            slots.resize(len(self.texts))
        self._state = self._state.select(torch.tensor(order))
        for name in ("texts", "_marks", "_lengths", "_missed"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in order])
        self._number_rows()

    def _number_rows(self) -> None:
        self.rows = {text: row for row, text in enumerate(self.texts)}
        self.layout += 1

    @torch.no_grad()
    def follow(self, present: Mapping[Text, int], last: Tensor | None, widest: int) -> dict[Text, Exception]:
        """Bring the state up to date with these texts; return those that cannot be read, and why.

        Args:
            present: the texts, with the places of their last tokens in `last`.
            last: the last tokens of texts, where only the device knows them.
            widest: the most candidates that are asked for.
        """
        grown = self._leave(present)
        if grown:
            self._advance(grown, self._find_tokens(grown, present, last))
        new = [text for text in present if text not in self.rows]
        failures: dict[Text, Exception] = {}
        for group in _group(new):
            failures |= self._read(group)
        self._reserve(widest)
        return failures

    def _leave(self, present: Mapping[Text, int]) -> list[int]:
        """Let texts leave that are gone, or are others than they were; return the rows of those that have grown."""
        patience = PATIENCE if len({*self.texts, *present}) <= self.capacity else 0
        staying: list[int] = []
        grown: set[Text] = set()
        for row, text in enumerate(self.texts):
            growth = text.growth(self._marks[row]) if text in present else 0
            self._missed[row] = 0 if text in present else self._missed[row] + 1
            if growth in (0, 1) and self._missed[row] <= patience:
                staying.append(row)
                if growth:
                    grown.add(text)
        self._keep(staying)
        return [row for row, text in enumerate(self.texts) if text in grown]

    def _find_tokens(self, rows: list[int], present: Mapping[Text, int], last: Tensor | None) -> Int[Tensor, " b"]:
        """The tokens to be read: the last one of the given rows, while all others rest."""
        if last is None:
            tokens = [RESTING] * len(self.texts)
            for row in rows:
                tokens[row] = self.texts[row].last
            if min(tokens) < 0:
                raise DataError(
                    "the engine has not told the last token of a text.", "turn asynchronous scheduling off."
                )
            return torch.tensor(tokens, device=self.device)
        places = [present[self.texts[row]] for row in rows]
        if self._moves[:2] != (rows, places):  # else the device knows them already
            self._moves = (rows, places, *(torch.tensor(part, device=self.device) for part in (rows, places)))
        targets, sources = self._moves[2:]
        return last.new_full((len(self.texts),), RESTING, dtype=torch.long).index_copy_(
            0, targets, last[sources].long()
        )

    def _advance(self, rows: list[int], tokens: Int[Tensor, " b"]) -> None:
        """Read one token in these rows."""
        state = self._state
        if self.reads_candidates and not self._are_candidates(tokens):
            state = state.map_readings(lambda reading: reading.drop_siblings())
        self._state = self._read_next(state, tokens) if self.graphs.on else self.guide.advance(state, tokens)
        for row in rows:
            self._marks[row], self._lengths[row] = self.texts[row].mark(), self._lengths[row] + 1

    def _read_next(self, state: Any, tokens: Int[Tensor, " b"]) -> Any:
        """Read one token of each text by a captured step. Slots of no text are computed along, and rest."""
        count = self._widen()
        self._next[: len(tokens)] = tokens
        self._next[len(tokens) : count] = RESTING
        shape = (count, *((slots.window, slots.epoch) for slots in self._slots()))
        return self.graphs.run(shape, lambda: self.guide.advance(state, self._next[:count]))

    def _widen(self) -> int:
        """Compute some free slots along, so that there are few different numbers of slots; return it."""
        count = min(1 << (len(self.texts) - 1).bit_length(), self.capacity)
        for slots in self._slots():
            slots.resize(count)
        return count

    def _are_candidates(self, tokens: Int[Tensor, " b"]) -> bool:
        """Whether each token is among the candidates that were read; another processor may force one that is not."""
        found = [reading.siblings for reading in list_readings(self._state)]
        return all(one is not None and bool((one.match(tokens).any(1) | (tokens == RESTING)).all()) for one in found)

    def _read(self, group: Sequence[Text]) -> dict[Text, Exception]:
        """Read texts from their beginnings, and let them join. If that fails, each is read alone."""
        try:
            state = self._start(group)
        except Exception as error:  # of one text, or for want of memory
            if len(group) == 1:
                return {group[0]: error}
            return {text: error for one in group for text, error in self._read([one]).items()}
        if self._state is None:
            self._state = state.map_readings(self._settle)
        else:
            for slots in self._slots():
                slots.resize(len(self.texts))
            self._state = self._state.join([self._state, state])
        self.texts = [*self.texts, *group]
        self._marks += [text.mark() for text in group]
        self._lengths += [text.length for text in group]
        self._missed += [0] * len(group)
        self._number_rows()
        return {}

    def _start(self, group: Sequence[Text]) -> Any:
        """Samples of a prompt have the same text at first, which is read once."""
        texts = [text.tokens() for text in group]
        unique: dict[Any, int] = {}
        places = [unique.setdefault(_key(tokens), len(unique)) for tokens in texts]
        distinct = [texts[places.index(place)] for place in range(len(unique))]
        state = self.guide.start(*_pad_left(distinct))
        return state if len(distinct) == len(texts) else state.select(torch.tensor(places))

    def _settle(self, reading: Reading) -> Reading:
        return settle(reading, *self._shape(reading.reader))

    def _reserve(self, widest: int) -> None:
        """Make room for the next token of every text, and for candidates that are read beside each other."""
        for slots in self._slots():
            slots.resize(len(self.texts))
            lengths = np.array(self._lengths, dtype=np.int64) + slots.reader.overhead
            slots.bounds[: slots.count] = np.repeat(lengths, slots.copies)
            slots.reserve(siblings=min(widest, SIBLINGS_PER_FORWARD) if slots.reader.reads_candidates else 0)

    # --- candidates ---

    def advise(self, rows: Int[Tensor, " b"], candidates: Int[Tensor, "b k"], beta: Float[Tensor, "b s"]) -> Advice:
        """The guide's opinion on candidates for the next token of the texts in some rows.

        If the guide reads candidates, these must be all rows of texts that go on.
        """
        if not self.reads_candidates:
            shown = self._state.map_readings(lambda reading: reading.show(rows))
            return self.guide.advise(shown, candidates, beta)
        count = len(self.texts)
        everywhere = candidates.new_zeros(count, candidates.shape[1]).index_copy_(0, rows, candidates)
        strengths = beta.new_zeros(count, beta.shape[1]).index_copy_(0, rows, beta)
        advice = self.guide.advise(self._state, everywhere, strengths)
        self._state = advice.state
        clipped = None if advice.clipped is None else advice.clipped[rows]
        rewards = None if advice.rewards is None else tuple(part[rows] for part in advice.rewards)
        return Advice(advice.shift[rows], None, clipped, rewards)


def _group(texts: Sequence[Text]) -> list[list[Text]]:
    """Group the texts that are read together: they have similar lengths, so that little padding is read with them."""
    groups: list[list[Text]] = []
    total = 0
    for text in sorted(texts, key=lambda text: text.length, reverse=True):
        padded = (len(groups[-1]) + 1) * groups[-1][0].length if groups else 0
        if not groups or padded > PROMPT_TOKENS or padded > PADDING * (total + text.length):
            groups.append([])
            total = 0
        groups[-1].append(text)
        total += text.length
    return groups


def _key(tokens: Int[Tensor, " t"]) -> Any:
    """Return a key that is equal for equal texts. Texts on a device are not compared, since that would wait for it."""
    return tuple(tokens.tolist()) if tokens.device.type == "cpu" else id(tokens)


def _pad_left(texts: Sequence[Int[Tensor, " t"]]) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    longest = max(map(len, texts))
    input_ids = texts[0].new_zeros(len(texts), longest, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, tokens in enumerate(texts):
        input_ids[row, longest - len(tokens) :] = tokens
        mask[row, longest - len(tokens) :] = 1
    return input_ids, mask
