"""CUDA graphs: operations on a GPU that are recorded once and then repeated without Python, which launches slowly."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from radq.numerics import collecting_later

T = TypeVar("T")


def record(operations: Callable[[], T], **options: Any) -> tuple[Any, T]:
    """Record what a function does on the GPU, without doing it; options are those of `torch.cuda.graph`.

    Returns the graph, and the result of the function, whose tensors every replay of the graph writes anew.
    """
    graph = torch.cuda.CUDAGraph()
    with collecting_later(), torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
        result = operations()
    return graph, result
