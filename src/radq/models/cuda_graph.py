"""CUDA graphs: operations on a GPU that are recorded once and then repeated without Python, which launches slowly."""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from radq.errors import first_line
from radq.numerics import collecting_later

T = TypeVar("T")
R = TypeVar("R")


def record(
    operations: Callable[[], R], pool: object = None, stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, R]:
    """Record what a function does on the GPU, without doing it, as `torch.cuda.graph` does.

    Returns the graph, and the result of the function, whose tensors every replay of the graph writes anew.
    """
    graph = torch.cuda.CUDAGraph()
    options = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    with collecting_later(), torch.cuda.graph(graph, **options):  # pyright: ignore[reportArgumentType]
        result = operations()
    return graph, result


class GraphCache(Generic[T]):
    """Recordings of operations that come again and again, one for each of their shapes.

    Operations that come for the first time are not recorded: libraries set themselves up in them, which no graph may
    hold. Where a model does what a graph cannot hold, a warning says so, and everything runs from Python from then on.
    """

    hindered = "steps are not captured as CUDA graphs, so each token takes longer"
    stops_at_full_memory = True  # a caller deals with it; otherwise operations that do not fit are not recorded

    def __init__(self, on: bool):
        self.on = on
        self._recorded: dict[Hashable, T] = {}
        self._warm: set[Hashable] = set()
        self._pool = None

    def __len__(self) -> int:
        return len(self._recorded)

    @property
    def pool(self) -> object:
        """The memory that graphs share, of which one is replayed after the other."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool

    def find(self, kind: Hashable, shape: Hashable, capture: Callable[[], T]) -> T | None:
        """Find what was recorded of a kind and shape; None where operations must run without a graph."""
        if not self.on:
            return None
        if kind not in self._warm:
            self._warm.add(kind)
            return None
        if (kind, shape) not in self._recorded:
            try:
                self._recorded[kind, shape] = capture()
            except Exception as error:  # whatever a model raises
                if isinstance(error, torch.OutOfMemoryError) and self.stops_at_full_memory:
                    raise
                self.give_up(first_line(error))
                return None
        return self._recorded[kind, shape]

    def give_up(self, reason: str) -> None:
        """Record no more, and say why. A recording that has failed may have left its work on the GPU."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        warnings.warn(f"{self.hindered}: {reason}.", stacklevel=4)
        self.on = False

    def clear(self) -> None:
        """Forget all graphs, since tensors have moved."""
        self._recorded.clear()
        self._pool = None  # a pool ends with its last graph


class StepGraphs(GraphCache[tuple[torch.cuda.CUDAGraph, Any]]):
    """The graphs of a step, which has one for each of its shapes."""

    replays = 0

    def run(self, shape: Hashable, step: Callable[[], R]) -> R:
        """Do a step. It may only compute with tensors that stay in their places while the shape is the same."""
        recorded = self.find(None, shape, lambda: record(step, self.pool))
        if recorded is None:
            return step()
        graph, result = recorded
        graph.replay()
        self.replays += 1
        return result
