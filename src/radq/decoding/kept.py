"""Engines that are kept beside their base model for the next call, with their slots and captured steps.

Captured steps go on reading the tensors that they were captured with. So an engine is used again only if nothing has
changed since then in the base model and in the guide: neither tensors, nor settings, adapters or hooks.
"""

from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor, nn

from radq.decoding.engine import KEPT, Engine
from radq.guides import Guide
from radq.models.loading import Wrappable

MOST_KEPT = 4  # engines
MOST_BYTES = 2**30  # of each


class _Kept:
    """Engines and what they were made with. Copies of the base model, also pickled ones, begin without any."""

    def __init__(self) -> None:
        self.engines: list[tuple[Engine, Hashable]] = []

    def __reduce__(self) -> Any:
        return _Kept, ()


def take_engine(lm: Wrappable, guide: Guide | None, batch_size: int | None) -> Engine:
    """An engine that was kept, or a new one. One that is taken belongs to the caller alone."""
    kept = vars(lm).get(KEPT)
    if kept is not None:
        found = describe(lm), describe(guide)
        for place, (engine, made_with) in enumerate(kept.engines):
            if engine.guide is guide and engine.max_rows == batch_size and made_with == found:
                del kept.engines[place]
                return engine
    return Engine(lm, guide, batch_size)


def keep_engine(engine: Engine) -> None:
    """Keep an engine that has ended all texts, if its captured steps are worth it."""
    if engine.decoder.captures.on and engine.rest().nbytes <= MOST_BYTES:
        kept = vars(engine.lm).setdefault(KEPT, _Kept())
        kept.engines.append((engine, (describe(engine.lm), describe(engine.guide))))
        del kept.engines[:-MOST_KEPT]


def describe(thing: Any) -> Hashable:
    """All that a captured step of a model or guide depends on."""
    if isinstance(thing, nn.Module):
        config = getattr(thing, "config", None)
        return type(thing), tuple(_parts(thing)), tuple(_settings(vars(config))) if config is not None else ()
    if hasattr(thing, "__dict__") and type(thing).__module__.startswith("radq."):
        return type(thing), tuple((name, describe(value)) for name, value in vars(thing).items())
    return _simple(thing)


def _parts(module: nn.Module) -> Iterator[Hashable]:
    for part in module.modules():
        hooks = (*part._forward_hooks, *part._forward_pre_hooks)
        tensors = (*part._parameters.values(), *part._buffers.values())
        places = tuple(_place(tensor) for tensor in tensors if tensor is not None)
        yield type(part), hooks, places, tuple(_settings(vars(part)))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tensor.device, tuple(tensor.shape)


def _settings(values: dict[str, Any]) -> Iterator[tuple[str, Hashable]]:
    """The numbers, names and flags among attributes."""
    for name, value in values.items():
        found = _simple(value)
        if found is not None:
            yield name, found


def _simple(value: Any) -> Hashable:
    """A number, name or flag as it is, lists of them as tuples; None for anything else."""
    if isinstance(value, bool | int | float | str):
        return type(value).__name__, value
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(_simple(one) for one in value)
    return None
