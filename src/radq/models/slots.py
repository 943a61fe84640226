"""Slots: the keys and values of many texts in one store per model, which is written in place.

    slots = settle(reading, capacity=25, width=64)   # a `Reading` becomes 25 slots of at least 64 columns
    slots.reserve()                                   # before each token: room for it
    slots.advance(tokens)                             # reads one token of every text

The methods of a `SlotReading` change it and return it. Row r writes
its next token at column `lengths[r]`, so rows need no padding, stopping or joining moves no other row, and a token that
is not to be kept is simply overwritten. What lies behind the end of a row is finite and is never seen.

Nothing between `reserve` and the next `reserve` waits for the device, and all tensors stay where they are until a row
joins or leaves, so a step can be captured as a CUDA graph.
Axes: b rows, k candidates, n new tokens, w columns, d hidden.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils.generic import ModelOutput

from radq.models import kv_cache
from radq.models.kv_cache import Siblings, grouped_heads
from radq.models.loading import Wrappable, evaluating
from radq.models.reading import Reader, Reading, ValueReading
from radq.numerics import Candidates, Tokens, enlarge, weakly_cached

ALIGNED = 8  # fused attention wants masks of such widths


class SlotReading(Reading):
    """A transformer's state after a batch of texts, in slots."""

    siblings: Siblings | None = None

    def __init__(self, reading: ValueReading, capacity: int, width: int, siblings: int = 0):
        """Make empty slots for texts like those of a reading, of `width` tokens, and for candidates behind them."""
        self.reader, self.copies = reading.reader, reading.copies
        self.count = 0  # slots in use, and those that a captured step computes along
        self.window = 0  # columns that the next forward sees
        self._reach = 0  # and those of the candidates behind them
        self.epoch = 0  # changes whenever tensors move
        self.device = reading.last.device
        self.capacity = self.width = 0
        self.layers = [_SlotLayer(self) for _ in reading.prefix.layers]
        self.cache = Cache(layers=[*self.layers])
        self.columns = torch.zeros(0, 0, dtype=torch.long)  # (b, n): where the forward in progress writes
        self.compiled: Callable[..., ModelOutput] | None = None  # for one number of columns
        self.bounds = np.zeros(0, dtype=np.int64)  # at most so many tokens has each row
        self._lengths = torch.zeros(0, dtype=torch.long, device=self.device)
        self._input_ids = reading.prefix.input_ids[:0, :0].long()
        self._last = reading.last[:0]
        self._notes = None if reading.notes is None else reading.notes[:0]
        shapes = [(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in reading.prefix.layers]
        # Keys and values of all layers with the same shape are one tensor each, (layers, slots, heads, width, size).
        self._members = [
            [layer for layer, own in zip(self.layers, shapes, strict=True) if own == shape]
            for shape in dict.fromkeys(shapes)
        ]
        self._stores = [
            reading.last.new_zeros(len(members), 0, heads, 0, size, dtype=reading.prefix.layers[0][0].dtype)
            for members, (heads, *sizes) in zip(self._members, dict.fromkeys(shapes), strict=True)
            for size in sizes
        ]
        self._allocate(capacity * self.copies, _round_window(width, self.device.type) + _align(siblings))

    # --- memory ---

    def _allocate(self, capacity: int, width: int) -> None:
        """Make the store larger, and keep what it holds."""
        n, self.capacity, self.width = self.count, capacity, width
        self.epoch += 1
        self._lengths = enlarge(self._lengths[:n], capacity)
        self._input_ids = enlarge(self._input_ids[:n], capacity, width)
        self._last = enlarge(self._last[:n], capacity, self._last.shape[1])
        self._notes = None if self._notes is None else enlarge(self._notes[:n], capacity, self._notes.shape[1])
        self._stores = [
            enlarge(store[:, :n], len(store), capacity, store.shape[2], width, store.shape[4]) for store in self._stores
        ]
        for members, keys, values in zip(self._members, self._stores[::2], self._stores[1::2], strict=True):
            for number, layer in enumerate(members):
                layer.keys, layer.values = keys[number], values[number]
        self.bounds = np.pad(self.bounds, (0, capacity - len(self.bounds)))

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    def reserve(self, alive: np.ndarray | None = None, siblings: int = 0) -> None:
        """Make room for one more token of every row, and for candidates that RAD-V reads beside each other.

        Texts that are not `alive` may overwrite their own tokens; by default all go on.
        """
        rows = slice(self.count) if alive is None else np.flatnonzero(np.repeat(alive, self.copies))
        self.window = _round_window(int(self.bounds[rows].max(initial=0)) + 1, self.device.type)
        wanted = self.window + _align(siblings)
        if wanted > self.width:
            self._allocate(self.capacity, max(wanted, 2 * self.width))
        if self.compiled is not None:  # for all columns at once, since another number would be compiled again
            self.window = self.width - _align(siblings)
        self._reach = self.window + _align(siblings)
        self.bounds[: self.count] += 1

    # --- rows ---

    @property
    def last(self) -> Float[Tensor, "b n"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._last[: self.count]

    @property
    def notes(self) -> Float[Tensor, "b m"] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self._notes is None else self._notes[: self.count]

    @property
    def lengths(self) -> Tokens:
        return self._lengths[: self.count]

    def resize(self, texts: int) -> "SlotReading":
        """Compute the first slots alone, or some free slots along."""
        self.count = texts * self.copies
        return self

    def make_room(self, texts: int, rows: int) -> "SlotReading":
        """Compute so many rows, of which so many texts are in use; there may have been slots for these alone."""
        self.resize(texts)
        if rows * self.copies > self.capacity:
            self._allocate(rows * self.copies, self.width)
        return self.resize(rows)

    def note(self, notes: Float[Tensor, "b m"]) -> "SlotReading":
        assert self._notes is not None
        self._notes[: self.count].copy_(notes)
        return self

    def select(self, texts: Int[Tensor, " r"]) -> "SlotReading":
        """The rows of the given texts, in that order. A row that keeps its place is not copied."""
        rows = self.rows_of(texts)
        sources = rows.tolist()
        moved = [(target, source) for target, source in enumerate(sources) if target != source]
        if len(sources) > self.capacity:
            self._allocate(len(sources), self.width)
        if moved:
            targets, origins = (torch.tensor(part, device=self.device) for part in zip(*moved, strict=True))
            columns = max(self._reach, int(self.bounds.max(initial=0)))
            for values in (self._lengths, self._input_ids, self._last, self._notes):
                if values is not None:
                    values.index_copy_(0, targets, values.index_select(0, origins))
            for store in self._stores:
                used = store[:, :, :, :columns]
                used.index_copy_(1, targets, used.index_select(1, origins))
        self.bounds[: len(sources)] = self.bounds[sources]
        self.bounds[len(sources) :] = 0
        self._lengths[len(sources) :] = 0
        self.count = len(sources)
        if self.siblings is not None:
            self.siblings = self.siblings.select(rows.to(self.device))
        return self

    def drop_siblings(self) -> "SlotReading":
        self.siblings = None
        return self

    @staticmethod
    def join(states: Sequence[Reading]) -> "SlotReading":
        """Put the rows of readings into free slots of the first one."""
        slots, *others = states
        assert isinstance(slots, SlotReading)
        for reading in others:
            assert isinstance(reading, ValueReading)
            slots.add(reading)
        return slots.drop_siblings()

    def add(self, reading: ValueReading) -> "SlotReading":
        """Copy the rows of a reading into free slots; what was padding on the left ends up behind the text."""
        prefix, first = reading.prefix, self.count
        lengths = prefix.attention_mask.sum(1)
        longest, rows = int(lengths.max()), slice(first, first + len(lengths))
        if rows.stop > self.capacity or longest > self.width:
            self._allocate(max(rows.stop, self.capacity), max(longest, self.width))
        t = prefix.input_ids.shape[1]
        columns = (torch.arange(longest, device=self.device) + (t - lengths)[:, None]).clamp(max=t - 1)  # (b, longest)
        self._lengths[rows] = lengths
        self._input_ids[rows, :longest] = prefix.input_ids.gather(1, columns)
        self._last[rows] = reading.last
        if self._notes is not None and reading.notes is not None:
            self._notes[rows] = reading.notes
        for layer, pair in zip(self.layers, prefix.layers, strict=True):
            for store, values in zip((layer.keys, layer.values), pair, strict=True):
                assert store is not None
                store[rows, :, :longest] = values.take_along_dim(columns[:, None, :, None], dim=2)
        self.bounds[rows] = lengths.cpu().numpy()
        self.count = rows.stop
        return self

    # --- reading ---

    @torch.no_grad()
    def read(self, tokens: Tokens) -> "SlotReading":
        """Read one more token of each row, all of which the model knows."""
        self._last[: self.count] = self._read(tokens, self.notes)
        self.lengths.add_(1)
        return self

    @torch.no_grad()
    def advance(self, tokens: Tokens) -> "SlotReading":
        """The state after one more token per row; where candidates were read, it must be one of them, or unknown."""
        tokens = tokens.to(self.device)
        known = tokens < self.reader.num_known
        output = self._read(tokens * known) if self.siblings is None else self._choose(self.siblings, tokens)
        self._last[: self.count] = torch.where(known[:, None], output, self.last)
        self.lengths.add_(known)
        return self.drop_siblings()

    def _read(self, tokens: Tokens, notes: Float[Tensor, "b m"] | None = None) -> Float[Tensor, "b d"]:
        """Return the output at one more token of each row, whose length is not changed; write the notes, too."""
        columns = self.lengths.clamp(max=self.window - 1)[:, None]  # (b, 1)
        self._input_ids[: self.count].scatter_(1, columns, tokens[:, None])
        seen = torch.arange(self.window, device=self.device) <= columns[..., None]  # (b, 1, w)
        return self.reader.take_last(self._forward(tokens[:, None], columns, columns, seen), notes)[0]

    def _choose(self, siblings: Siblings, tokens: Tokens) -> Float[Tensor, "b d"]:
        """Put the candidates that are these tokens behind the texts; return the output at them."""
        b, index = len(tokens), siblings.match(tokens).int().argmax(1)
        columns = self.lengths.clamp(max=self.window - 1)
        for store in self._stores:  # (layers, slots, heads, w, size)
            rows = store[:, :b]
            chosen = rows.take_along_dim((self.window + index).view(1, b, 1, 1, 1), dim=3)
            rows.scatter_(3, columns.view(1, b, 1, 1, 1).expand_as(chosen), chosen)
        self._input_ids[:b].scatter_(1, columns[:, None], tokens[:, None])
        return siblings.hidden.take_along_dim(index.view(b, 1, 1), dim=1).squeeze(1)

    @torch.no_grad()
    def read_siblings(self, candidates: Candidates) -> "SlotReading":
        """Read candidates for the next token, none of which sees another, in columns behind those of the texts."""
        b, k = candidates.shape
        known = candidates * (candidates < self.reader.num_known)
        columns = torch.arange(self.window, self.window + k, device=self.device).expand(b, k)
        positions = self.lengths[:, None].expand(b, k)
        before = torch.arange(self.window, device=self.device) < self.lengths[:, None]  # (b, w)
        itself = torch.eye(k, _align(k), dtype=torch.bool, device=self.device).expand(b, k, -1)
        seen = torch.cat([before[:, None].expand(b, k, -1), itself], dim=2)
        self.siblings = Siblings(candidates, self.reader.take_each(self._forward(known, columns, positions, seen)))
        return self

    @torch.no_grad()
    def read_over(self, tokens: Int[Tensor, "b n"], starts: Tokens) -> Float[Tensor, "b n d"]:
        """Read n tokens of each row from the given column on, over whatever stood there; return the output at each.

        So drafts of a text are read and, where they are rejected, overwritten by what follows. Lengths are the caller's
        business.
        """
        columns = (starts[:, None] + torch.arange(tokens.shape[1], device=self.device)).clamp(max=self.window - 1)
        self._input_ids[: self.count].scatter_(1, columns, tokens)
        seen = torch.arange(self.window, device=self.device) <= columns[..., None]
        return self.reader.take_each(self._forward(tokens, columns, columns, seen))

    def rewind(self, n: int) -> "SlotReading":
        """Go back to the state before the last n tokens of every row, all of which the model knows."""
        self.lengths.sub_(n + 1)
        return self.read(self._input_ids[: self.count].gather(1, self.lengths[:, None]).squeeze(1))

    def _forward(
        self, tokens: Int[Tensor, "b n"], columns: Tensor, positions: Tensor, seen: Bool[Tensor, "b n w"]
    ) -> ModelOutput:
        self.columns, self.seen_width = columns, seen.shape[2]
        reader, model = self.reader, self.reader.model
        extra: dict[str, object] = dict(reader.arguments if tokens.shape[1] == 1 else reader.state_arguments)
        if kv_cache.accepts(model, "position_ids"):
            limit = reader.max_positions
            extra["position_ids"] = positions if limit is None else positions.clamp(max=limit - 1)

        def see(window: int | None) -> Bool[Tensor, "b n w"]:
            if window is None:
                return seen
            near = torch.arange(seen.shape[2], device=self.device) > positions[..., None] - window
            near[..., self.window :] = True  # candidates stand at the end of the text, whatever their column
            return seen & near

        mask = kv_cache.additive_masks(model, self._stores[0].dtype, see)
        forward = self.compiled or model
        with grouped_heads(model):
            return forward(input_ids=tokens, attention_mask=mask, past_key_values=self.cache, use_cache=True, **extra)


class _SlotLayer(DynamicLayer):
    """One layer of the store, as transformers' models write and read it."""

    def __init__(self, slots: SlotReading):
        super().__init__()
        self.slots = slots
        self.is_initialized = True

    def lazy_initialization(self, *_: object, **__: object) -> None:
        """The store is there already."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        b, width, columns = len(key_states), self.slots.seen_width, self.slots.columns
        index = columns[:, None, :, None]
        keys, values = self.keys[:b, :, :width], self.values[:b, :, :width]  # pyright: ignore[reportOptionalSubscript]
        keys.scatter_(2, index.expand_as(key_states), key_states)
        values.scatter_(2, index.expand_as(value_states), value_states)
        return keys, values

    def get_seq_length(self, *_: object) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.seen_width, 0


def _align(number: int) -> int:
    return -(-number // ALIGNED) * ALIGNED


def _round_window(columns: int, device: str) -> int:
    """Choose the number of columns to compute with. On a GPU it is one of few, since each needs a captured step."""
    if device == "cpu":
        return _align(columns)
    step = 64
    while columns > 4 * step:
        step *= 2
    return -(-columns // step) * step


def settle(reading: Reading, capacity: int, width: int, siblings: int = 0) -> Reading:
    """Move a reading into new slots, or leave it as it is where its model cannot work with slots."""
    if not isinstance(reading, ValueReading) or not takes_slots(reading.reader):
        return reading
    slots = SlotReading(reading, max(capacity, -(-len(reading.last) // reading.copies)), width, siblings)
    return slots.add(reading)


def plan_bytes(reading: ValueReading, capacity: int, width: int, siblings: int = 0) -> int:
    """The memory of the slots that `settle` would make."""
    columns = _round_window(width, reading.last.device.type) + _align(siblings)
    tensors = [values for pair in reading.prefix.layers for values in pair]
    column = sum(values.shape[1] * values.shape[3] * values.element_size() for values in tensors)
    return capacity * reading.copies * columns * column


def takes_slots(reader: Reader) -> bool:
    """Whether a model reads the same in slots as alone. No configuration tells this, so it is tried once."""
    return _try_slots(reader.model, reader=reader)


@weakly_cached
@torch.no_grad()
def _try_slots(model: Wrappable, *, reader: Reader) -> bool:
    if not kv_cache.layer_types(model) <= kv_cache.MASKED_TYPES:
        return False

    def start(*tokens: int) -> ValueReading:
        text = torch.tensor([tokens], device=reader.device)
        return reader.read(text, torch.ones_like(text))

    try:
        with evaluating(model):
            short, long = start(3), start(3, 4, 5)
            slots = SlotReading(short, 2, 8).add(short).add(long)
            expected = [reading.read(torch.tensor([6], device=reader.device)).last for reading in (short, long)]
            slots.reserve()
            slots.read(torch.tensor([6, 6], device=reader.device))
            return kv_cache.agree(slots.last, torch.cat(expected))
    except Exception:  # whatever a model raises when handed a cache or mask that it does not understand
        return False
