"""Attention of heads that share keys and values (grouped-query attention), without copies of keys and values.

If there is a mask, transformers repeats keys and values for every head of a group. At decoding, when one query reads a
whole cache, these copies are most of the memory traffic. Here the heads of a group become rows of one query instead, so
that they read the same keys and values. The results are the same.

Fused kernels are made for long queries. When hundreds of sequences decode on a GPU, each with a query of one token,
they spend most of their time on padding, and two plain products around a softmax are faster.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from radq.models.loading import Wrappable
from radq.numerics import at_least_float32

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
AttentionMaskInterface.register(GROUPED, sdpa_mask)
