"""Padding of token ids, and log-probabilities of tokens, worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radq import numerics
from radq.numerics import at_least_float32, log_probabilities, pad_left, pad_right


def test_padding_stands_on_the_side_that_is_asked_for() -> None:
    texts = [[5, 6, 7], [8], []]
    input_ids, attention_mask = pad_left(texts)
    assert input_ids.tolist() == [[5, 6, 7], [0, 0, 8], [0, 0, 0]]
    assert attention_mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0]]
    input_ids, attention_mask = pad_right(texts, pad_id=9)
    assert input_ids.tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert attention_mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert pad_left([[]])[0].shape == (1, 0)


def test_log_probabilities_by_hand() -> None:
    logits = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.1, 0.4]]).log()
    found = log_probabilities(logits, torch.tensor([1, 2]))
    assert found.tolist() == pytest.approx([math.log(0.75), math.log(0.4)])
    assert log_probabilities(logits, torch.tensor([2, 0]))[0] == -math.inf  # a token that the model excludes


def test_half_precision_is_upcast_and_double_precision_stays() -> None:
    dtypes = [at_least_float32(torch.ones(1, dtype=kind)).dtype for kind in (torch.float16, torch.bfloat16)]
    assert dtypes == [torch.float32, torch.float32]
    assert at_least_float32(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 7), st.integers(1, 40), st.integers(0, 2**16))
def test_log_probabilities_have_the_gradients_of_log_softmax(b: int, t: int, v: int, at_once: int, seed: int) -> None:
    """Also of parts of longer texts, and however few logits are taken at once."""
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(b, t + 2, v, generator=generator, dtype=torch.float64)).requires_grad_()
    tokens = torch.randint(v, (b, t), generator=generator)
    weights = torch.randn(b, t, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "LOGITS_AT_ONCE", at_once)
        found = log_probabilities(logits[:, 1 : t + 1], tokens)
        (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    expected = logits[:, 1 : t + 1].log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    (right,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, right)


def test_log_probabilities_of_half_precision_are_computed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    half = (3 * torch.randn(3, 5, 50, generator=generator)).bfloat16().requires_grad_()
    tokens = torch.randint(50, (3, 5), generator=generator)
    single = half.detach().float().requires_grad_()
    for logits in (half, single):
        log_probabilities(logits, tokens).sum().backward()
    assert log_probabilities(half, tokens).dtype == torch.float32
    torch.testing.assert_close(log_probabilities(half, tokens), log_probabilities(single, tokens))
    assert half.grad is not None
    assert single.grad is not None
    torch.testing.assert_close(half.grad, single.grad.bfloat16())
