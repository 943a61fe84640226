"""Prefixes with their keys and values. Only this module touches transformers' Cache, attention masks and positions.

A `Prefix` is a value. Nothing here changes one in place: extending, forking, selecting, cropping and choosing a sibling
all return a new one, so an old prefix stays usable for rollback, beams and several continuations.

Rows are padded on the left and positions are counted from the mask, so padding changes nothing.
Axes: b batch, t time, n new tokens, k candidates, d hidden.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils.generic import ModelOutput

from radq.errors import ModelError
from radq.models.grouped_attention import grouped_heads
from radq.models.loading import Wrappable, evaluating

Layers = tuple[tuple[Tensor, Tensor], ...]  # keys and values of each layer, (b, heads, t, head size)
MASKED_TYPES = {"full_attention", "sliding_attention"}  # layers for which this file can write a mask


@dataclass(frozen=True)
class Prefix:
    input_ids: Int[Tensor, "b t"]
    attention_mask: Int[Tensor, "b t"]
    layers: Layers

    def fork(self, n: int) -> "Prefix":
        """Repeat every row n times, with the copies of a row side by side."""
        return self._map(lambda x: x.repeat_interleave(n, dim=0))

    def select(self, rows: Int[Tensor, " r"]) -> "Prefix":
        return self._map(lambda x: x.index_select(0, rows.to(x.device)))

    def crop(self, n: int) -> "Prefix":
        """Remove the last n tokens of every row."""
        t = self.input_ids.shape[1] - n
        layers = tuple((keys[:, :, :t], values[:, :, :t]) for keys, values in self.layers)
        return Prefix(self.input_ids[:, :t], self.attention_mask[:, :t], layers)

    def trim(self) -> "Prefix":
        """Remove the columns that are padding in all rows."""
        unused = self.attention_mask.shape[1] - int(self.attention_mask.sum(1).max())
        layers = tuple((keys[:, :, unused:], values[:, :, unused:]) for keys, values in self.layers)
        return Prefix(self.input_ids[:, unused:], self.attention_mask[:, unused:], layers)

    def _map(self, f: Callable[[Tensor], Tensor]) -> "Prefix":
        layers = tuple((f(keys), f(values)) for keys, values in self.layers)
        return Prefix(f(self.input_ids), f(self.attention_mask), layers)


def join(prefixes: Sequence[Prefix]) -> Prefix:
    """The rows of all prefixes as one batch, padded no more than the longest row needs."""
    longest = max(int(prefix.attention_mask.sum(1).max()) for prefix in prefixes)

    def fit(x: Tensor, dim: int) -> Tensor:
        return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (longest - x.shape[dim], 0))  # below 0 takes padding away

    layers = zip(*(prefix.layers for prefix in prefixes), strict=True)  # per layer, the pairs of all prefixes
    return Prefix(
        torch.cat([fit(prefix.input_ids, 1) for prefix in prefixes]),
        torch.cat([fit(prefix.attention_mask, 1) for prefix in prefixes]),
        tuple((torch.cat([fit(k, 2) for k, _ in pairs]), torch.cat([fit(v, 2) for _, v in pairs])) for pairs in layers),
    )


@contextmanager
def known_positions() -> Iterator[None]:
    """Let models read whole texts inside the block without asking the device how these texts are padded.

    transformers looks whether positions are consecutive and whether there is padding without a mask, and Python waits
    for each answer. Texts that are packed to the left have consecutive positions, and need no mask.
    """
    answers: dict[str, tuple[object, object]] = {
        "find_packed_sequence_indices": (masking_utils, None),
        "is_tracing": (masking_utils, False),  # masks of a step that is captured as a CUDA graph are those of any step
        "warn_if_padding_and_no_attention_mask": (PreTrainedModel, None),
    }
    with ExitStack() as stack:
        for name, (owner, answer) in answers.items():
            if hasattr(owner, name):  # versions of transformers differ
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, lambda *_, answer=answer, **__: answer)
        yield


def hold_rows(held: Bool[Tensor, " b"], prefix: Prefix, longer: Prefix) -> Prefix:
    """Take the held rows from `prefix` and the other rows from `longer`, which has one more column.

    A held row moves right by a column, so that all padding stays on the left and sliding windows stay as wide. Columns
    that are padding in all rows go.
    """

    def choose(old: Tensor, new: Tensor, dim: int) -> Tensor:
        shifted = F.pad(old, (0, 0) * (old.dim() - 1 - dim) + (1, 0))
        return torch.where(held.view(-1, *[1] * (old.dim() - 1)), shifted, new)

    pairs = zip(prefix.layers, longer.layers, strict=True)
    return Prefix(
        choose(prefix.input_ids, longer.input_ids, 1),
        choose(prefix.attention_mask, longer.attention_mask, 1),
        tuple((choose(k, new_k, 2), choose(v, new_v, 2)) for (k, v), (new_k, new_v) in pairs),
    ).trim()


def start(
    model: Wrappable, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"], **kwargs: object
) -> tuple[ModelOutput, Prefix]:
    """Read a left-padded batch of prompts."""
    if not bool(attention_mask.all()):
        check_padding(model)
    empty = Prefix(input_ids[:, :0], attention_mask[:, :0], ())
    return extend(model, empty, input_ids, attention_mask, **kwargs)


def extend(
    model: Wrappable,
    prefix: Prefix,
    input_ids: Int[Tensor, "b n"],
    attention_mask: Int[Tensor, "b n"] | None = None,
    **kwargs: object,
) -> tuple[ModelOutput, Prefix]:
    """Feed n more tokens per row; returns the model's output for them and the longer prefix."""
    new_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    full_mask = torch.cat([prefix.attention_mask, new_mask], dim=1)
    positions = (full_mask.cumsum(1) - 1).clamp(min=0)[:, prefix.input_ids.shape[1] :]
    output, layers = _forward(model, prefix.layers, input_ids, full_mask, positions, **kwargs)
    return output, Prefix(torch.cat([prefix.input_ids, input_ids], dim=1), full_mask, layers)


def read_with_masks(
    model: Wrappable, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"], **kwargs: object
) -> tuple[ModelOutput, Prefix]:
    """Do what `start` does, with masks that are written here: transformers' own make the program wait for the GPU."""
    t = input_ids.shape[1]
    places = torch.arange(t, device=input_ids.device)
    distance = places[:, None] - places  # (t, t), from a token back to another
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)

    def build(layer_type: str) -> Tensor:
        seen = (distance >= 0) & attention_mask.bool()[:, None]  # (b, t, t)
        if layer_type == "sliding_attention":
            seen = seen & (distance < model.config.sliding_window)
        return torch.zeros_like(seen, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)[:, None]

    masks = {layer_type: build(layer_type) for layer_type in layer_types(model)}
    mask = masks if len(masks) > 1 else masks.popitem()[1]
    output, layers = _forward(model, (), input_ids, mask, positions, **kwargs)
    return output, Prefix(input_ids, attention_mask, layers)


def take_states(output: ModelOutput, layers: tuple[int, ...]) -> Float[Tensor, "b t n"]:
    """Take the outputs of layers at each token, side by side, or without layers that of the whole backbone."""
    return (
        torch.cat([output["hidden_states"][layer] for layer in layers], dim=-1)
        if layers
        else output["last_hidden_state"]
    )


@dataclass(frozen=True)
class Siblings:
    """k candidates read after one prefix, none of them seeing another."""

    candidates: Int[Tensor, "b k"]
    hidden: Float[Tensor, "b k d"]

    def match(self, tokens: Int[Tensor, " b"]) -> Bool[Tensor, "b k"]:
        """Mark the candidates that are the tokens of their rows."""
        return self.candidates == tokens[:, None]

    def select(self, rows: Int[Tensor, " r"]) -> "Siblings":
        return Siblings(self.candidates[rows], self.hidden[rows])

    def choose(self, index: Int[Tensor, " b"]) -> Prefix:
        """The prefix extended by candidate `index` of each row, without another forward."""
        raise NotImplementedError  # slots hold the keys and values of their siblings


def read_siblings(
    backbone: PreTrainedModel, prefix: Prefix, candidates: Int[Tensor, "b k"], layers: tuple[int, ...] = ()
) -> Siblings:
    """Read all candidates in one forward if the backbone takes a 4D mask, else as rows of a k times larger batch.

    Where `layers` are given, their outputs are the hidden states of the candidates, side by side.
    """
    read = _read_masked if takes_siblings(backbone) else _read_rows
    return read(backbone, prefix, candidates, layers)


@dataclass(frozen=True)
class _MaskedSiblings(Siblings):
    prefix: Prefix
    layers: Layers  # of the siblings alone

    def choose(self, index: Int[Tensor, " b"]) -> Prefix:
        def append(past: Tensor, siblings: Tensor) -> Tensor:
            b, heads, _, size = siblings.shape
            chosen = siblings.gather(2, index.view(b, 1, 1, 1).expand(b, heads, 1, size))
            return torch.cat([past, chosen], dim=2)

        pairs = zip(self.prefix.layers, self.layers, strict=True)
        layers = tuple((append(k, sibling_k), append(v, sibling_v)) for (k, v), (sibling_k, sibling_v) in pairs)
        token = self.candidates.gather(1, index[:, None])
        return Prefix(
            torch.cat([self.prefix.input_ids, token], dim=1),
            torch.cat([self.prefix.attention_mask, torch.ones_like(token)], dim=1),
            layers,
        )

    def select(self, rows: Int[Tensor, " r"]) -> "_MaskedSiblings":
        layers = tuple((keys[rows], values[rows]) for keys, values in self.layers)
        return _MaskedSiblings(self.candidates[rows], self.hidden[rows], self.prefix.select(rows), layers)


def _read_masked(
    backbone: PreTrainedModel, prefix: Prefix, candidates: Int[Tensor, "b k"], layers: tuple[int, ...] = ()
) -> _MaskedSiblings:
    t = prefix.input_ids.shape[1]
    positions = prefix.attention_mask.sum(1, keepdim=True).expand_as(candidates)  # siblings share one position
    hidden, stored = _read_branches(backbone, prefix, positions, candidates, layers)
    tails = tuple((keys[:, :, t:], values[:, :, t:]) for keys, values in stored)
    return _MaskedSiblings(candidates, hidden, prefix, tails)


def read_places(
    backbone: PreTrainedModel,
    prefix: Prefix,
    places: Int[Tensor, "b p"],
    candidates: Int[Tensor, "b p k"],
    layers: tuple[int, ...] = (),
) -> Float[Tensor, "b p k n"]:
    """Read candidates at several places of texts in one forward, if the backbone `takes_siblings`.

    A place is the number of the text's tokens, those put before it included, that its candidates follow.
    """
    p, k = candidates.shape[1:]
    positions = places.repeat_interleave(k, dim=1)
    hidden, _ = _read_branches(backbone, prefix, positions, candidates.flatten(1), layers)
    return hidden.unflatten(1, (p, k))


def _read_branches(
    backbone: PreTrainedModel,
    prefix: Prefix,
    positions: Int[Tensor, "b n"],
    tokens: Int[Tensor, "b n"],
    layers: tuple[int, ...],
) -> tuple[Float[Tensor, "b n d"], Layers]:
    """Read tokens at positions of their own, each of which sees the prefix up to there and itself."""
    masks = _branch_masks(backbone, prefix.attention_mask, positions)
    output, stored = _forward(backbone, prefix.layers, tokens, masks, positions, output_hidden_states=bool(layers))
    return take_states(output, layers), stored


@dataclass(frozen=True)
class _RowSiblings(Siblings):
    rows: Prefix  # (b · k) rows

    def choose(self, index: Int[Tensor, " b"]) -> Prefix:
        b, k, _ = self.hidden.shape
        return self.rows.select(torch.arange(b, device=index.device) * k + index)

    def select(self, rows: Int[Tensor, " r"]) -> "_RowSiblings":
        k = self.hidden.shape[1]
        expanded = rows[:, None] * k + torch.arange(k, device=rows.device)  # (r, k)
        return _RowSiblings(self.candidates[rows], self.hidden[rows], self.rows.select(expanded.flatten()))


def _read_rows(
    backbone: PreTrainedModel, prefix: Prefix, candidates: Int[Tensor, "b k"], layers: tuple[int, ...] = ()
) -> _RowSiblings:
    b, k = candidates.shape
    output, rows = extend(backbone, prefix.fork(k), candidates.reshape(b * k, 1), output_hidden_states=bool(layers))
    return _RowSiblings(candidates, take_states(output, layers).view(b, k, -1), rows)


def _branch_masks(
    backbone: PreTrainedModel, prefix_mask: Int[Tensor, "b t"], positions: Int[Tensor, "b n"]
) -> Tensor | dict[str, Tensor]:
    """Additive masks of shape (b, 1, n, t + n), one per layer type."""
    b, n = positions.shape
    itself = torch.eye(n, dtype=torch.bool, device=prefix_mask.device).expand(b, n, n)
    places = prefix_mask.cumsum(1, dtype=torch.int32) - 1  # (b, t), the position of each token
    distance = positions.int()[:, :, None] - places[:, None]  # (b, n, t), from a branch back to a token
    earlier = prefix_mask.bool()[:, None] & (distance > 0)

    def build(layer_type: str) -> Tensor:
        sliding = layer_type == "sliding_attention"  # a window counts the token itself
        seen = earlier & (distance < backbone.config.sliding_window) if sliding else earlier
        allowed = torch.cat([seen, itself], dim=2)
        additive = torch.zeros(allowed.shape, dtype=backbone.dtype, device=allowed.device)
        return additive.masked_fill(~allowed, torch.finfo(backbone.dtype).min)[:, None]

    masks = {layer_type: build(layer_type) for layer_type in layer_types(backbone)}
    return masks if len(masks) > 1 else masks.popitem()[1]


def layer_types(backbone: Wrappable) -> set[str]:
    """The types of a model's layers, each of which has a mask of its own."""
    window = getattr(backbone.config, "sliding_window", None)
    return set(getattr(backbone.config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])


# What models can do is tried once, on three tokens, and remembered: they differ in ways no configuration tells, such as
# ALiBi, flash attention, chunked layers, or a wrapper that drops arguments.

_TAKES_SIBLINGS: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
_TAKES_PADDING: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def takes_siblings(backbone: PreTrainedModel) -> bool:
    """Whether a sibling mask gives this backbone's true hidden states."""
    if backbone not in _TAKES_SIBLINGS:
        _TAKES_SIBLINGS[backbone] = layer_types(backbone) <= MASKED_TYPES and _try_siblings(backbone)
    return _TAKES_SIBLINGS[backbone]


@torch.no_grad()
def _try_siblings(backbone: PreTrainedModel) -> bool:
    input_ids = torch.arange(3, device=backbone.device)[None]
    candidates = torch.arange(3, 5, device=backbone.device)[None]
    _, prefix = start(backbone, input_ids, torch.ones_like(input_ids))
    expected = _read_rows(backbone, prefix, candidates).hidden
    try:
        return agree(_read_masked(backbone, prefix, candidates).hidden, expected)
    except Exception:  # whatever a backbone raises when handed a mask it does not understand
        return False


def takes_padding(model: Wrappable) -> bool:
    """Whether a model reads a padded text as the text alone."""
    if model not in _TAKES_PADDING:
        with evaluating(model):
            _TAKES_PADDING[model] = _try_padding(model)
    return _TAKES_PADDING[model]


def check_padding(model: Wrappable) -> None:
    if not takes_padding(model):
        raise ModelError(
            f"{type(model).__name__} gives other results for a padded text than for the text alone: it neither takes "
            "position_ids nor finds the positions from the attention mask.",
            "decode prompts of different lengths one by one, or pass the model without the wrapper around it.",
        )


@torch.no_grad()
def _try_padding(model: Wrappable) -> bool:
    text = torch.arange(3, 6, device=model.device)[None]

    def read(padding: int) -> Tensor:
        """Logits or hidden states at the last token."""
        input_ids, attention_mask = F.pad(text, (padding, 0)), F.pad(torch.ones_like(text), (padding, 0))
        return extend(model, Prefix(input_ids[:, :0], attention_mask[:, :0], ()), input_ids, attention_mask)[0][0][
            :, -1
        ]

    return agree(read(4), read(0))


def agree(actual: Tensor, expected: Tensor) -> bool:
    """Whether numbers are equal to rounding. Where the expected ones have overflowed, they count as equal."""
    rounded = torch.finfo(actual.dtype).eps > 1e-6 or torch.is_autocast_enabled(actual.device.type)
    tolerance = 0.05 if rounded else 1e-4  # under autocast, results in float32 were computed in half precision
    error = (actual - expected).abs().max() / expected.abs().max()
    return bool(error < tolerance) or not bool(expected.isfinite().all())


def _forward(
    model: Wrappable,
    layers: Layers,
    input_ids: Int[Tensor, "b n"],
    attention_mask: Tensor | dict[str, Tensor],
    positions: Int[Tensor, "b n"],
    **kwargs: object,
) -> tuple[ModelOutput, Layers]:
    if accepts(model, "position_ids"):  # families without it find positions from the mask (ALiBi)
        kwargs["position_ids"] = positions
    cache = _to_cache(layers)
    with grouped_heads(model):
        output = model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True, **kwargs
        )
    return output, _from_cache(cache, model)


_ACCEPTED: WeakKeyDictionary[nn.Module, dict[str, bool]] = WeakKeyDictionary()


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether a model's forward takes an argument, also through wrappers (PEFT, torch.compile) that hand it on."""
    known = _ACCEPTED.setdefault(model, {})
    if argument not in known:
        inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
        known[argument] = _takes(model, argument) and _takes(inner, argument)
    return known[argument]


def _takes(model: nn.Module, argument: str) -> bool:
    """Whether a forward has an argument. A wrapper takes any argument, a model of transformers only those it names."""
    parameters = inspect.signature(model.forward).parameters
    hands_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return argument in parameters or (hands_on and not isinstance(model, PreTrainedModel))


def _to_cache(layers: Layers) -> DynamicCache:
    # Full-length layers also for sliding-window backbones: the mask does the windowing, siblings and crops stay exact.
    # Filled by hand, because the constructor copies. `update` concatenates, so the prefix's tensors are never written.
    cache = DynamicCache()
    for keys, values in layers:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def _from_cache(cache: DynamicCache, model: Wrappable) -> Layers:
    layers = [(layer.keys, layer.values) for layer in cache.layers if type(layer) is DynamicLayer]
    pairs = tuple((keys, values) for keys, values in layers if keys is not None and values is not None)
    if not pairs or len(pairs) < len(cache.layers):
        raise ModelError(
            f"{type(model).__name__} does not keep plain keys and values for every layer.",
            "radq decodes with attention-only decoder models (GPT-2, LLaMA, Qwen3, GPT-NeoX, Gemma-3, Mistral, …).",
        )
    return pairs
