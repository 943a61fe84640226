"""Short prompts on a GPU, read by CUDA graphs: launching a forward from Python takes longer than the forward itself.

    graphs = PromptGraphs([lm])
    with graphs.used():
        reading = reader.read(input_ids, attention_mask)   # from the second batch of a shape on by a graph

The keys and values of such a reading stand in the memory of a graph, which the next batch of this shape overwrites. So
they must be copied before, as `radq.models.slots` does. Axes: b rows, t time, d hidden.
"""

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from radq.errors import first_line
from radq.models.cuda_graph import record
from radq.models.kv_cache import Prefix, read_with_masks

MOST_TOKENS = 1024  # longer prompts keep a GPU busy without graphs
MOST_SHAPES = 16
STEP = 8  # lengths are rounded up, so that there are few shapes

_USED: ContextVar["PromptGraphs | None"] = ContextVar("prompt_graphs", default=None)


@dataclass(frozen=True)
class _PromptGraph:
    graph: Any
    input_ids: Int[Tensor, "b t"]
    attention_mask: Int[Tensor, "b t"]
    last: Any  # what the reader takes of the last tokens
    prefix: Prefix


class PromptGraphs:
    """Captured forwards over prompts, for each model and each shape of a batch."""

    def __init__(self, models: Collection[nn.Module]):
        """The models must take masks of all pairs of tokens, as those do that work with slots."""
        self._models = set(models)
        self._kept: dict[Any, _PromptGraph | None] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        token = _USED.set(self)
        try:
            yield
        finally:
            _USED.reset(token)

    def read(
        self, reader: Any, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"]
    ) -> tuple[Any, Prefix] | None:
        """Read a batch of prompts by a graph, and return the reader's output at their last tokens, and the prefix.

        None stands for a batch that must be read without a graph.
        """
        model = reader.model
        if model not in self._models or not input_ids.is_cuda or input_ids.numel() > MOST_TOKENS:
            return None
        gap = -input_ids.shape[1] % STEP
        input_ids, attention_mask = F.pad(input_ids, (gap, 0)), F.pad(attention_mask, (gap, 0))
        key = (model, reader.layers, *input_ids.shape)
        if key not in self._kept:
            if len(self._kept) < MOST_SHAPES:
                self._kept[key] = None
            return None
        found = self._kept[key]
        if found is None:
            try:
                found = self._kept[key] = _capture(reader, input_ids, attention_mask)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model does that a graph cannot hold
                self._models.clear()
                torch.cuda.synchronize()
                warnings.warn(
                    f"prompts are not read by CUDA graphs, which takes longer: {first_line(error)}.", stacklevel=2
                )
                return None
        found.input_ids.copy_(input_ids)
        found.attention_mask.copy_(attention_mask)
        found.graph.replay()
        return found.last, found.prefix


def _capture(reader: Any, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"]) -> _PromptGraph:
    input_ids, attention_mask = input_ids.clone(), attention_mask.clone()
    graph, (output, prefix) = record(
        lambda: read_with_masks(reader.model, input_ids, attention_mask, **reader.arguments)
    )
    return _PromptGraph(graph, input_ids, attention_mask, reader.take_last(output), prefix)


def prompt_graphs() -> PromptGraphs | None:
    """Return the graphs that are used at the moment; None outside of a block that uses some."""
    return _USED.get()
