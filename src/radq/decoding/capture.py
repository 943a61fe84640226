"""Steps that are captured as CUDA graphs, so that a GPU runs one after the other without waiting for Python.

A graph repeats the same operations on the same tensors, so there is one for each number of rows and columns. It is
captured when a step of this shape comes for the first time, and kept. Steps that cannot be captured run one by one, by
the same code.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from radq.guides.base import Guide
from radq.guides.meter import Meter
from radq.models.cuda_graph import NO_STEPS, record, try_to_record
from radq.numerics import empty_cache

T = TypeVar("T")


@dataclass(frozen=True)
class Capture(Generic[T]):
    """Both halves of a captured step, and the tensors that the first one writes."""

    draw: torch.cuda.CUDAGraph
    read: torch.cuda.CUDAGraph
    drawn: T
    counted: tuple[int, ...]  # by a meter, in one step


class Captures(Generic[T]):
    """The captured steps of a decoder."""

    def __init__(self, models: Sequence[nn.Module], guide: Guide | None, on: bool):
        self.on = on and stand_together(models)
        if self.on and (reason := find_hindrance(models, guide)):
            self.on = False
            warnings.warn(f"{NO_STEPS}: {reason}.", stacklevel=2)
        self.meter = guide if isinstance(guide, Meter) else None
        self._kept: dict[Hashable, Capture[T]] = {}
        self._warm: set[Hashable] = set()
        self._pool = None
        self._main: torch.cuda.Stream | None = None
        self._side: torch.cuda.Stream | None = None

    def find(
        self,
        kind: Hashable,
        shape: Hashable,
        draw: Callable[[], T],
        read: Callable[[T, torch.cuda.Stream | None], None],
    ) -> Capture[T] | None:
        """Find the captured step of a kind and shape; None where a step must run without a graph.

        The first step of every kind is not captured: libraries initialise themselves in it, which no graph can hold.

        Args:
            draw: the first half of the step.
            read: the second half, given the result of the first and a stream that may be used beside the current one.
        """
        if not self.on:
            return None
        if kind not in self._warm:
            self._warm.add(kind)
            return None
        if (kind, shape) not in self._kept:
            recorded = try_to_record(lambda: self._capture(draw, read), NO_STEPS)
            if recorded is None:
                self.on = False
                return None
            self._kept[kind, shape] = recorded
        return self._kept[kind, shape]

    def _capture(self, draw: Callable[[], T], read: Callable[[T, torch.cuda.Stream | None], None]) -> Capture[T]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._main, self._side = torch.cuda.Stream(priority=-1), torch.cuda.Stream()  # the base model goes first
        before = None if self.meter is None else self.meter.counts
        first, drawn = record(draw, pool=self._pool, stream=self._main)
        second, _ = record(lambda: read(drawn, self._side), pool=self._pool, stream=self._main)
        counted = () if self.meter is None or before is None else self.meter.take_back(before)
        return Capture(first, second, drawn, counted)

    def count(self, capture: Capture[T], share: float) -> None:
        """Tell a meter what a captured step has read for the rows in use, which may be fewer than those of the step."""
        if self.meter is not None:
            self.meter.add(capture.counted, share)

    def clear(self) -> None:
        """Forget all captured steps, since their tensors have moved."""
        if self._kept:
            self._kept.clear()
            self._pool = None  # a pool ends with its last graph
            empty_cache()  # its memory serves nothing else until then


def stand_together(models: Sequence[nn.Module]) -> bool:
    """Whether all models are on one device, which is all that a graph can hold."""
    return len({parameter.device for model in models for parameter in model.parameters()}) <= 1


def find_hindrance(models: Sequence[nn.Module], guide: Guide | None) -> str | None:
    """Find a reason why captured steps, in which Python does not run, might differ from others; None without one."""
    if guide is not None and not guide.capturable:
        return f"{type(guide).__name__} does not say by `capturable = True` that its methods only compute with tensors"
    for model in models:
        if is_watched(model):
            return f"a forward hook of {type(model).__name__} must be called in each; remove it to decode faster"
    return None


def is_watched(model: nn.Module) -> bool:
    """Whether forwards of a model call functions that are not radq's: a captured step would not call them."""
    hooks = [
        hook for part in model.modules() for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    ]
    return not all(map(_is_known, hooks))


def _is_known(hook: object) -> bool:
    """Whether a hook belongs to a meter, or is one by which transformers collects hidden states."""
    own = isinstance(getattr(hook, "__self__", None), Meter)
    return own or getattr(hook, "__module__", "") == "transformers.utils.output_capturing"
