"""Attention of grouped heads gives the results of transformers' own attention."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import make_lm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from radq.models import kv_cache as grouped
from radq.models.kv_cache import grouped_attention, grouped_heads


@settings(max_examples=50, deadline=None)
@given(
    b=st.integers(1, 3),
    shared=st.integers(1, 3),
    groups=st.integers(1, 4),
    n=st.integers(1, 5),
    past=st.integers(0, 6),
    kind=st.sampled_from(["bool", "additive", "none"]),
    seed=st.integers(0, 1000),
)
def test_it_equals_repeated_keys_and_values(
    b: int, shared: int, groups: int, n: int, past: int, kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(b, heads, t, 8, generator=generator, dtype=torch.float64)
        for heads, t in ((shared * groups, n), (shared, past + n), (shared, past + n))
    )
    allowed = torch.rand(b, 1, n, past + n, generator=generator) < 0.6
    allowed[..., -1] = True
    masks = {"bool": allowed, "additive": torch.zeros(allowed.shape).double().masked_fill(~allowed, -1e9), "none": None}
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = groups, True  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    expected, _ = sdpa_attention_forward(module, query, key, value, masks[kind], scaling=0.3)
    actual, _ = grouped_attention(module, query, key, value, masks[kind], scaling=0.3)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", ["bool", "additive", "none"])
def test_plain_products_equal_the_fused_kernel(kind: str) -> None:
    query, key, value = (torch.randn(4, 2, t, 8, dtype=torch.float64) for t in (3, 5, 5))
    allowed = torch.rand(4, 1, 1, 5) < 0.6
    allowed[..., -1] = True
    masks = {"bool": allowed, "additive": torch.zeros(allowed.shape).double().masked_fill(~allowed, -1e9), "none": None}
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=masks[kind], scale=0.3)
    torch.testing.assert_close(grouped.plain_attention(query, key, value, masks[kind], 0.3), expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3"])
def test_a_backbone_uses_it_inside_the_block_only(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, key_heads = make_lm(family), []
    scaled = grouped.F.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        key_heads.append(key.shape[1])
        return scaled(query, key, *args, **kwargs)

    monkeypatch.setattr(grouped.F, "scaled_dot_product_attention", noted)
    input_ids, attention_mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    with torch.no_grad():
        expected = lm(input_ids=input_ids, attention_mask=attention_mask).logits
        assert set(key_heads) == {4}  # copies for every head
        key_heads.clear()
        with grouped_heads(lm):
            assert lm.config._attn_implementation == grouped.GROUPED
            actual = lm(input_ids=input_ids, attention_mask=attention_mask).logits
    assert lm.config._attn_implementation == "sdpa"
    torch.testing.assert_close(actual[attention_mask.bool()], expected[attention_mask.bool()])
    assert set(key_heads) == {2}
