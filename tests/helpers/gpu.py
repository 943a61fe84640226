"""Tests that need a CUDA GPU, which `tests/conftest.py` hides unless RADQ_TEST_GPU is set."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

Test = TypeVar("Test", bound=Callable[..., None])


def on_gpu(test: Test) -> Test:
    """Let `make test-gpu` run this test; all other runs skip it."""
    reason = "needs a CUDA GPU: run `make test-gpu` on a machine that has one"
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)(test))
