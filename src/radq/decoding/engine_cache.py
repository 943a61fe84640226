"""Engines that are kept beside their base model for the next call, with their slots and captured steps.

Captured steps go on reading the tensors that they were captured with. So an engine is used again only if nothing has
changed since then in the base model and in the guide: neither tensors, nor settings, adapters or hooks.
"""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn

from radq.decoding.engine import KEPT, Engine
from radq.guides import Guide
from radq.guides.meter import Meter
from radq.models.loading import Wrappable
from radq.numerics import empty_cache, version_of

MOST_KEPT = 4  # engines
MOST_BYTES = 2**31  # of all of them, or
MOST_SHARE = 8  # an eighth of the memory of a GPU, where that is more


class _Kept:
    """Engines and what they were made with. Copies of the base model, also pickled ones, begin without any."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Kept, ()


def take_engine(lm: Wrappable, guide: Guide | None, batch_size: int | None, compile: bool = False) -> Engine:
    """An engine that was kept, or a new one. One that is taken belongs to the caller alone."""
    if lm.device.type != "cuda" and not compile:
        return Engine(lm, guide, batch_size)
    kept = vars(lm).setdefault(KEPT, _Kept())
    made_with = describe(lm), describe(guide)
    for place, engine in enumerate(kept.engines):
        same = engine.guide is guide and engine.max_rows == batch_size and engine.compile == compile
        if same and engine.made_with == made_with:
            return kept.engines.pop(place)
    engine = Engine(lm, guide, batch_size, compile=compile)
    engine.made_with = made_with
    return engine


def keep_engine(engine: Engine) -> None:
    """Keep an engine that has ended all texts, if it has captured or compiled anything."""
    if engine.decoder.captures.on or engine.compile:
        kept = vars(engine.lm).setdefault(KEPT, _Kept())
        kept.engines.append(engine.rest())
        while len(kept.engines) > MOST_KEPT or sum(one.nbytes for one in kept.engines) > most_bytes(engine):
            kept.engines.pop(0).decoder.clear()  # the caller may still hold the engine
            empty_cache()  # torch keeps the memory of graphs that are gone, and uses it for nothing else


def most_bytes(engine: Engine) -> int:
    device = engine.lm.device
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return max(MOST_BYTES, total // MOST_SHARE)


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
    return tensor.data_ptr(), version_of(tensor), tensor.dtype


SIMPLE = {bool, int, float, str}


def _settings(values: Mapping[str, object]) -> tuple[Hashable, ...]:
    """The numbers, names and flags among attributes, and lists of them."""
    return tuple(
        (name, value if type(value) in SIMPLE else repr(value))
        for name, value in values.items()
        if type(value) in SIMPLE or _lists_simple(value)
    )


def _lists_simple(value: object) -> bool:
    if not isinstance(value, list | tuple) or type(value) not in (list, tuple):
        return False
    return all(type(one) in SIMPLE for one in value)
