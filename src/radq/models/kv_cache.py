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

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.generic import ModelOutput

from radq.errors import ModelError
from radq.models.loading import Wrappable, evaluating
from radq.numerics import Candidates, Texts, Tokens, at_least_float32, weakly_cached

Layers = tuple[tuple[Tensor, Tensor], ...]  # keys and values of each layer, (b, heads, t, head size)
MASKED_TYPES = {"full_attention", "sliding_attention"}  # layers for which this file can write a mask


@dataclass(frozen=True)
class Prefix:
    input_ids: Texts
    attention_mask: Texts
    layers: Layers

    @classmethod
    def empty(cls, input_ids: Texts) -> "Prefix":
        """The prefix before the first of some tokens."""
        return cls(input_ids[:, :0], torch.ones_like(input_ids[:, :0]), ())

    @staticmethod
    def combine(prefixes: "Sequence[Prefix]", change: Callable[[Sequence[Tensor], int], Tensor]) -> "Prefix":
        """Make a prefix from those tensors of others that belong together; `change` is told their axis of time."""
        layers = (zip(*pairs, strict=True) for pairs in zip(*(prefix.layers for prefix in prefixes), strict=True))
        return Prefix(
            change([prefix.input_ids for prefix in prefixes], 1),
            change([prefix.attention_mask for prefix in prefixes], 1),
            tuple((change(keys, 2), change(values, 2)) for keys, values in layers),
        )

    def select(self, rows: Int[Tensor, " r"]) -> "Prefix":
        return Prefix.combine([self], lambda parts, _: parts[0].index_select(0, rows.to(parts[0].device)))

    def crop(self, n: int) -> "Prefix":
        """Remove the last n tokens of every row."""
        return Prefix.combine([self], lambda parts, time: parts[0].narrow(time, 0, parts[0].shape[time] - n))


def _pad_time(values: Tensor, columns: int, time: int) -> Tensor:
    """Put columns of zeros before the first one; a number below 0 takes columns away."""
    return F.pad(values, (0, 0) * (values.dim() - 1 - time) + (columns, 0))


def join(prefixes: Sequence[Prefix]) -> Prefix:
    """The rows of all prefixes as one batch, padded no more than the longest row needs."""
    longest = max(int(prefix.attention_mask.sum(1).max()) for prefix in prefixes)
    return Prefix.combine(
        prefixes, lambda parts, time: torch.cat([_pad_time(part, longest - part.shape[time], time) for part in parts])
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

    def choose(parts: Sequence[Tensor], time: int) -> Tensor:
        old, new = parts
        return torch.where(held.view(-1, *[1] * (old.dim() - 1)), _pad_time(old, 1, time), new)

    return join([Prefix.combine([prefix, longer], choose)])


def start(model: Wrappable, input_ids: Texts, attention_mask: Texts, **kwargs: object) -> tuple[ModelOutput, Prefix]:
    """Read a left-padded batch of prompts."""
    return extend(model, Prefix.empty(input_ids), input_ids, attention_mask, **kwargs)


def extend(
    model: Wrappable,
    prefix: Prefix,
    input_ids: Int[Tensor, "b n"],
    attention_mask: Int[Tensor, "b n"] | None = None,
    **kwargs: object,
) -> tuple[ModelOutput, Prefix]:
    """Feed n more tokens per row; returns the model's output for them and the longer prefix."""
    if not prefix.layers and attention_mask is not None and not bool(attention_mask.all()):
        check_padding(model)
    new_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    full_mask = torch.cat([prefix.attention_mask, new_mask], dim=1)
    positions = _positions(full_mask)[:, prefix.input_ids.shape[1] :]
    output, layers = _forward(model, prefix.layers, input_ids, full_mask, positions, **kwargs)
    return output, Prefix(torch.cat([prefix.input_ids, input_ids], dim=1), full_mask, layers)


def _positions(attention_mask: Texts) -> Texts:
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


def read_with_masks(
    model: Wrappable, input_ids: Texts, attention_mask: Texts, **kwargs: object
) -> tuple[ModelOutput, Prefix]:
    """Do what `start` does, with masks that are written here: transformers' own make the program wait for the GPU."""
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    distance = columns[:, None] - columns  # (t, t), from a token back to another

    def see(window: int | None) -> Bool[Tensor, "b t t"]:
        near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return near & attention_mask.bool()[:, None]

    masks = additive_masks(model, model.dtype, see)
    output, layers = _forward(model, (), input_ids, masks, _positions(attention_mask), **kwargs)
    return output, Prefix(input_ids, attention_mask, layers)


def additive_masks(
    model: Wrappable, dtype: torch.dtype, see: Callable[[int | None], Bool[Tensor, "b n w"]]
) -> Tensor | dict[str, Tensor]:
    """Additive masks (b, 1, n, w), one per layer type; `see` tells what tokens see within a window with themselves."""

    def build(layer_type: str) -> Tensor:
        seen = see(model.config.get_text_config().sliding_window if layer_type == "sliding_attention" else None)
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]

    masks = {layer_type: build(layer_type) for layer_type in layer_types(model)}
    return masks if len(masks) > 1 else masks.popitem()[1]


def take_states(output: ModelOutput, layers: tuple[int, ...]) -> Float[Tensor, "b t n"]:
    """Take the outputs of layers at each token, side by side, or without layers that of the whole backbone."""
    if not layers:
        return output["last_hidden_state"]
    return torch.cat([output["hidden_states"][layer] for layer in layers], dim=-1)


@dataclass(frozen=True)
class Siblings:
    """k candidates read after one prefix, none of them seeing another."""

    candidates: Candidates
    hidden: Float[Tensor, "b k d"]
    layers: Layers = ()  # of the candidates alone; slots hold theirs behind the texts

    def match(self, tokens: Tokens) -> Bool[Tensor, "b k"]:
        """Mark the candidates that are the tokens of their rows."""
        return self.candidates == tokens[:, None]

    def select(self, rows: Int[Tensor, " r"]) -> "Siblings":
        layers = tuple((keys[rows], values[rows]) for keys, values in self.layers)
        return Siblings(self.candidates[rows], self.hidden[rows], layers)

    def choose(self, prefix: Prefix, index: Tokens) -> tuple[Prefix, Float[Tensor, "b d"]]:
        """The prefix extended by candidate `index` of each row, without another forward, and the output there."""

        def append(parts: Sequence[Tensor], time: int) -> Tensor:
            chosen = parts[1].take_along_dim(index.view(-1, *[1] * (parts[1].dim() - 1)), dim=time)
            return torch.cat([parts[0], chosen], dim=time)

        own = Prefix(self.candidates, torch.ones_like(self.candidates), self.layers)
        return Prefix.combine([prefix, own], append), self.hidden.take_along_dim(index.view(-1, 1, 1), dim=1).squeeze(1)


def read_siblings(
    backbone: PreTrainedModel, prefix: Prefix, candidates: Candidates, layers: tuple[int, ...] = ()
) -> Siblings:
    """Read all candidates in one forward if the backbone takes a 4D mask, else as rows of a k times larger batch."""
    read = _read_masked if takes_siblings(backbone) else _read_rows
    return read(backbone, prefix, candidates, layers)


def _read_masked(
    backbone: PreTrainedModel, prefix: Prefix, candidates: Candidates, layers: tuple[int, ...] = ()
) -> Siblings:
    t = prefix.input_ids.shape[1]
    positions = prefix.attention_mask.sum(1, keepdim=True).expand_as(candidates)  # siblings share one position
    hidden, stored = read_branches(backbone, prefix, positions, candidates, layers)
    return Siblings(candidates, hidden, tuple((keys[:, :, t:], values[:, :, t:]) for keys, values in stored))


def _read_rows(
    backbone: PreTrainedModel, prefix: Prefix, candidates: Candidates, layers: tuple[int, ...] = ()
) -> Siblings:
    b, k = candidates.shape
    copies = prefix.select(torch.arange(b, device=candidates.device).repeat_interleave(k))
    output, rows = extend(backbone, copies, candidates.reshape(b * k, 1), output_hidden_states=bool(layers))

    def take_last(values: Float[Tensor, "bk h t s"]) -> Float[Tensor, "b h k s"]:
        return values[:, :, -1].unflatten(0, (b, k)).transpose(1, 2)

    tails = tuple((take_last(keys), take_last(values)) for keys, values in rows.layers)
    return Siblings(candidates, take_states(output, layers).view(b, k, -1), tails)


def read_branches(
    backbone: PreTrainedModel,
    prefix: Prefix,
    positions: Int[Tensor, "b n"],
    tokens: Int[Tensor, "b n"],
    layers: tuple[int, ...],
) -> tuple[Float[Tensor, "b n d"], Layers]:
    """Read tokens at positions of their own, each of which sees the prefix up to there and itself."""
    b, n = positions.shape
    itself = torch.eye(n, dtype=torch.bool, device=tokens.device).expand(b, n, n)
    before = prefix.attention_mask.cumsum(1, dtype=torch.int32) - 1  # (b, t), the position of each token
    distance = positions.int()[:, :, None] - before[:, None]  # (b, n, t), from a branch back to a token
    earlier = prefix.attention_mask.bool()[:, None] & (distance > 0)

    def see(window: int | None) -> Bool[Tensor, "b n w"]:
        return torch.cat([earlier if window is None else earlier & (distance < window), itself], dim=2)

    masks = additive_masks(backbone, backbone.dtype, see)
    output, stored = _forward(backbone, prefix.layers, tokens, masks, positions, output_hidden_states=bool(layers))
    return take_states(output, layers), stored


@weakly_cached
def layer_types(backbone: Wrappable) -> set[str]:
    """The types of a model's layers, each of which has a mask of its own."""
    window = getattr(backbone.config, "sliding_window", None)
    return set(getattr(backbone.config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])


# What models can do is tried once, on three tokens, and remembered: they differ in ways no configuration tells, such as
# ALiBi, flash attention, chunked layers, or a wrapper that drops arguments.


@weakly_cached
@torch.no_grad()
def takes_siblings(backbone: PreTrainedModel) -> bool:
    """Whether a sibling mask gives this backbone's true hidden states."""
    if not layer_types(backbone) <= MASKED_TYPES:
        return False
    input_ids = torch.arange(3, device=backbone.device)[None]
    candidates = torch.arange(3, 5, device=backbone.device)[None]
    _, prefix = start(backbone, input_ids, torch.ones_like(input_ids))
    expected = _read_rows(backbone, prefix, candidates).hidden
    try:
        return agree(_read_masked(backbone, prefix, candidates).hidden, expected)
    except Exception:  # whatever a backbone raises when handed a mask it does not understand
        return False


@weakly_cached
@torch.no_grad()
def takes_padding(model: Wrappable) -> bool:
    """Whether a model reads a padded text as the text alone."""
    text = torch.arange(3, 6, device=model.device)[None]

    def read(padding: int) -> Tensor:
        """Logits or hidden states at the last token."""
        mask = F.pad(torch.ones_like(text), (padding, 0))
        return _forward(model, (), F.pad(text, (padding, 0)), mask, _positions(mask))[0][0][:, -1]

    with evaluating(model):
        return agree(read(4), read(0))


def check_padding(model: Wrappable) -> None:
    if not takes_padding(model):
        raise ModelError(
            f"{type(model).__name__} gives other results for a padded text than for the text alone: it neither takes "
            "position_ids nor finds the positions from the attention mask.",
            "decode prompts of different lengths one by one, or pass the model without the wrapper around it.",
        )


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


@weakly_cached
def accepts(model: nn.Module, argument: str) -> bool:
    """Whether a model's forward takes an argument, also through wrappers (PEFT, torch.compile) that hand it on."""
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    return _takes(model, argument) and _takes(inner, argument)


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


# --- attention of heads that share keys and values (grouped-query attention), without copies of these ---

# If there is a mask, transformers repeats keys and values for every head of a group. At decoding, when one query reads
# a whole cache, these copies are most of the memory traffic. Here the heads of a group become rows of one query, so
# that they read the same keys and values. The results are the same. Fused kernels are made for long queries: when
# hundreds of sequences decode on a GPU, each with a query of one token, they spend most of their time on padding, and
# two plain products around a softmax are faster.

GROUPED = "radq_grouped"
MANY_ROWS = 256  # below this, the additional kernel launches of plain products cost more than they save


@contextmanager
def grouped_heads(model: Wrappable) -> Iterator[None]:
    """Let a model whose heads share keys and values use `grouped_attention` in place of SDPA inside the block."""
    config = model.config
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if config._attn_implementation != "sdpa" or shared is None or shared == heads:
        yield
        return
    config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def grouped_attention(
    module: nn.Module,
    query: Float[Tensor, "b heads n d"],
    key: Float[Tensor, "b shared t d"],
    value: Float[Tensor, "b shared t e"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention with the signature and the output (b, n, heads, e) that transformers expects."""
    b, heads, n, d = query.shape
    groups = heads // key.shape[1]
    if groups == 1 or (attention_mask is None and n > 1) or kwargs.get("position_bias") is not None:
        arguments = (module, query, key, value, attention_mask, dropout, scaling)
        return sdpa_attention_forward(*arguments, **kwargs)  # pyright: ignore[reportArgumentType]
    if attention_mask is not None and n > 1:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    rows = query.reshape(b, -1, groups * n, d)  # the heads of a group are adjacent
    if n == 1 and b >= MANY_ROWS and query.is_cuda and not dropout:
        output = plain_attention(rows, key, value, attention_mask, d**-0.5 if scaling is None else scaling)
    else:
        output = F.scaled_dot_product_attention(
            rows, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
        )
    return output.reshape(b, heads, n, -1).transpose(1, 2).contiguous(), None


def plain_attention(
    query: Float[Tensor, "b shared n d"],
    key: Float[Tensor, "b shared t d"],
    value: Float[Tensor, "b shared t e"],
    attention_mask: Tensor | None,
    scaling: float,
) -> Float[Tensor, "b shared n e"]:
    """Attention as two products around a softmax, which is computed in float32 or better."""
    scores = at_least_float32((query * scaling) @ key.transpose(-1, -2))  # (b, shared, n, t)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    elif attention_mask is not None:
        scores = scores + attention_mask
    return scores.softmax(-1).to(value.dtype) @ value


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, masking_utils.sdpa_mask)
