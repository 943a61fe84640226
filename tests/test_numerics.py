"""Padding of token ids, and log-probabilities of tokens, worked by hand."""

import math

import pytest
import torch

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
