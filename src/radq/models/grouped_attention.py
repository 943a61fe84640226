"""Attention of heads that share keys and values, without copies of them.

transformers repeats keys and values for every head of a group where there is a mask, which at decoding is most of the
traffic: one query reads a whole cache. Here the heads of a group are rows of one query instead, and share what they
read. The numbers are the same.

Fused kernels are made for long queries. Where thousands of rows decode on a GPU, each of one token, they spend most of
their time on padding, and two plain products around a softmax are faster.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from radq.numerics import at_least_float32

GROUPED = "radq_grouped"
MANY_ROWS = 256  # fewer leave a GPU waiting for launches, of which plain products need more


@contextmanager
def grouped_heads(model: Any) -> Iterator[None]:
    """Within, a model that would use SDPA for grouped heads reads its keys and values once."""
    config: Any = model.config
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """In the form transformers asks for: (b, n, heads, e)."""
    b, heads, n, d = query.shape
    groups = heads // key.shape[1]
    if groups == 1 or (attention_mask is None and n > 1) or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    mask = attention_mask if attention_mask is None or n == 1 else attention_mask.repeat(1, 1, groups, 1)
    rows = query.reshape(b, -1, groups * n, d)  # heads of a group are neighbours
    if n == 1 and b >= MANY_ROWS and query.is_cuda and not dropout:
        output = plain_attention(rows, key, value, mask, d**-0.5 if scaling is None else scaling)
    else:
        output = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output.reshape(b, heads, n, -1).transpose(1, 2).contiguous(), None


def plain_attention(
    query: Float[Tensor, "b shared n d"],
    key: Float[Tensor, "b shared t d"],
    value: Float[Tensor, "b shared t e"],
    mask: Tensor | None,
    scaling: float,
) -> Float[Tensor, "b shared n e"]:
    """As it is written down; the softmax is in float32 or better."""
    scores = at_least_float32((query * scaling) @ key.transpose(-1, -2))  # (b, shared, n, t)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).to(value.dtype) @ value


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
