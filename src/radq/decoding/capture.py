"""Steps that are captured as CUDA graphs, so that a GPU runs one after the other without waiting for Python.

A graph repeats the same operations on the same tensors, so there is one for each number of rows and columns. Steps that
cannot be captured run one by one, by the same code.
"""

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from radq.guides.base import Guide
from radq.guides.meter import Meter
from radq.models.cuda_graph import GraphCache, record
from radq.numerics import empty_cache, state_of

T = TypeVar("T")


@dataclass(frozen=True)
class Capture(Generic[T]):
    """Both halves of a captured step, and the tensors that the first one writes."""

    draw: torch.cuda.CUDAGraph
    read: torch.cuda.CUDAGraph
    drawn: T
    counted: tuple[int, ...]  # by a meter, in one step


class Captures(GraphCache[Capture[T]]):
    """The captured steps of a decoder."""

    def __init__(self, models: Sequence[nn.Module], guide: Guide | None, on: bool):
        super().__init__(on and len({parameter.device for model in models for parameter in model.parameters()}) <= 1)
        if self.on and (reason := find_hindrance(models, guide)):
            self.on = False
            warnings.warn(f"{self.hindered}: {reason}.", stacklevel=2)
        self.meter = guide if isinstance(guide, Meter) else None
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def capture(self, draw: Callable[[], T], read: Callable[[T, torch.cuda.Stream | None], None]) -> Capture[T]:
        """Record both halves of a step; `read` is given the result of `draw`, and a stream beside the current one."""
        self._streams = self._streams or (torch.cuda.Stream(priority=-1), torch.cuda.Stream())
        main, side = self._streams  # the base model goes first
        before = None if self.meter is None else self.meter.counts
        first, drawn = record(draw, self.pool, main)
        second, _ = record(lambda: read(drawn, side), self.pool, main)
        counted = () if self.meter is None or before is None else self.meter.take_back(before)
        return Capture(first, second, drawn, counted)

    def count(self, capture: Capture[T], share: float) -> None:
        """Tell a meter what a captured step has read for the rows in use, which may be fewer than those of the step."""
        if self.meter is not None:
            self.meter.add(capture.counted, share)

    def clear(self) -> None:
        if self._recorded:
            super().clear()
            empty_cache()  # the memory of a pool serves nothing else until then


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
    collecting = "transformers.utils.output_capturing"  # by which transformers collects hidden states
    return not all(
        isinstance(getattr(hook, "__self__", None), Meter) or getattr(hook, "__module__", "") == collecting
        for hook in hooks
    )


# --- what must not change while captured steps are kept ---


def describe(thing: object) -> Hashable:
    """All that a captured step of a model or guide depends on."""
    if isinstance(thing, nn.Module):
        config = getattr(thing, "config", None)
        parts = tuple(map(_describe_part, thing.modules()))
        return type(thing), parts, () if config is None else _settings(vars(config))
    if isinstance(thing, Meter):
        return Meter, describe(thing.guide)  # without what it has counted
    if isinstance(thing, list | tuple):
        return type(thing), tuple(map(describe, thing))  # such as the parts of a sum
    if isinstance(thing, Tensor):
        return _describe_tensor(thing)
    if isinstance(thing, Guide) or (hasattr(thing, "__dict__") and type(thing).__module__.startswith("radq.")):
        return type(thing), tuple((name, describe(value)) for name, value in vars(thing).items())
    return _settings({"": thing})


def _describe_part(part: nn.Module) -> Hashable:
    """The tensors, settings and hooks of a module itself. There may be a thousand modules, so this is quick."""
    tensors = (*part._parameters.values(), *part._buffers.values())
    places = [_describe_tensor(tensor) for tensor in tensors if tensor is not None]
    return type(part), tuple(places), (*part._forward_hooks, *part._forward_pre_hooks), _settings(vars(part))


def _describe_tensor(tensor: Tensor) -> Hashable:
    return *state_of(tensor), tensor.dtype


SIMPLE = {bool, int, float, str}


def _settings(values: Mapping[str, object]) -> tuple[Hashable, ...]:
    """The numbers, names and flags among attributes, and lists of them."""
    return tuple(
        (name, value if type(value) in SIMPLE else repr(value))
        for name, value in values.items()
        if type(value) in SIMPLE
        or (isinstance(value, list | tuple) and type(value) in (list, tuple) and {*map(type, value)} <= SIMPLE)
    )
