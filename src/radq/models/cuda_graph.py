"""CUDA graphs: operations on a GPU that are recorded once and then repeated without Python, which launches slowly."""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from radq.errors import first_line
from radq.numerics import collecting_later

T = TypeVar("T")
NO_STEPS = "steps are not captured as CUDA graphs, so each token takes longer"


def record(
    operations: Callable[[], T], pool: object = None, stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Record what a function does on the GPU, without doing it; pool and stream are those of `torch.cuda.graph`.

    Returns the graph, and the result of the function, whose tensors every replay of the graph writes anew.
    """
    graph = torch.cuda.CUDAGraph()
    options = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
    with collecting_later(), torch.cuda.graph(graph, **options):  # pyright: ignore[reportArgumentType]
        result = operations()
    return graph, result


def try_to_record(capture: Callable[[], T], hindered: str) -> T | None:
    """Record graphs by a function; None, and a warning, where a model does what a graph cannot hold."""
    try:
        return capture()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model raises
        torch.cuda.synchronize()
        warnings.warn(f"{hindered}: {first_line(error)}.", stacklevel=3)
        return None


class StepGraphs:
    """The graphs of a step that comes again and again, one for each of its shapes.

    The first step is not recorded: libraries set themselves up in it, which no graph may hold. A step that cannot be
    recorded runs from Python.
    """

    def __init__(self, on: bool):
        self.on = on
        self.replays = 0
        self._kept: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._warm = False
        self._pool = None

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, shape: Hashable, step: Callable[[], T]) -> T:
        """Do a step. It may only compute with tensors that stay in their places while the shape is the same."""
        if not self.on or not self._warm:
            self._warm = True
            return step()
        if shape not in self._kept:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            recorded = try_to_record(lambda: record(step, pool=self._pool), NO_STEPS)
            if recorded is None:
                self.on = False
                return step()
            self._kept[shape] = recorded
        graph, result = self._kept[shape]
        graph.replay()
        self.replays += 1
        return result

    def clear(self) -> None:
        """Forget all graphs, since tensors have moved."""
        self._kept.clear()
        self._pool = None  # a pool ends with its last graph
