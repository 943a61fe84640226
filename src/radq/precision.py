"""Numbers of models in half precision, where sums and small differences of them are taken; and numbers that are the
same to the last digit, whatever ran before.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def precise(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """In float32 or better."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_probabilities(logits: Float[Tensor, "*p v"], tokens: Int[Tensor, "*p"]) -> Float[Tensor, "*p"]:
    """Of one token at each place, over the whole vocabulary. log_softmax makes one pass, logsumexp several."""
    return precise(logits).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


@contextmanager
def without_emulation_notice() -> Iterator[None]:
    """Hide torch's warning that a CPU has no bfloat16 of its own: the numbers are the same, it only takes longer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        yield


@contextmanager
def same_kernels() -> Iterator[None]:
    """Make the results inside the block independent of what the process has computed before; also a decorator.

    On a CPU without bfloat16, torch turns its oneDNN kernels off for the rest of the process at the first product in
    bfloat16, and other kernels round differently. Here they are on at the beginning.
    """
    kernels: Any = torch.backends.mkldnn
    before = kernels.enabled
    kernels.enabled = True
    try:
        yield
    finally:
        kernels.enabled = before
