"""How prompts are read: in turns, so that other texts need not wait for a long one, and on a GPU by CUDA graphs.

    prefill = Prefill(lambda turn: guide.start_in_turns(Prompts(input_ids, attention_mask, turn)))
    while not prefill.read(512):
        ...               # other work, after every 512 tokens, whichever models of the guide have read them
    state = prefill.result

Axes: b rows, t time.
"""

import sys
from collections.abc import Callable, Collection, Generator, Hashable
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from radq.models.cuda_graph import GraphCache, record
from radq.numerics import Texts

T = TypeVar("T")
InTurns = Generator[None, None, T]  # work that stops where a turn is over, and has a result in the end

MOST_TOKENS = 1024  # longer prompts keep a GPU busy without graphs
MOST_SHAPES = 16
STEP = 8  # lengths are rounded up, so that there are few shapes


class Turn:
    """The tokens that models may read together before other work goes on; without a limit unless one is set."""

    def __init__(self, graphs: "PromptGraphs | None" = None):
        """`graphs` read short prompts, whose keys and values must be copied before the next ones are read."""
        self.graphs = graphs
        self.begin(sys.maxsize)

    def begin(self, tokens: int) -> None:
        self._tokens = self._left = tokens

    def take(self, rows: int, columns: int) -> int:
        """Take some of these columns to be read now; none if the turn is over. The first of a turn get one at least."""
        taken = min(columns, max(self._left // rows, int(self._left == self._tokens)))
        self._left -= taken * rows
        return taken


class Prefill(Generic[T]):
    """Work that reads prompts in turns."""

    def __init__(self, work: Callable[[Turn], InTurns[T]]):
        self.result: T | None = None  # when everything is read
        self._turn = Turn()
        self._work = work(self._turn)

    @torch.no_grad()
    def read(self, tokens: int) -> bool:
        """Let models read so many tokens together; return whether nothing is left to read."""
        self._turn.begin(tokens)
        try:
            next(self._work)
        except StopIteration as end:
            self.result = end.value
            return True
        return False


@torch.no_grad()
def finish(work: InTurns[T]) -> T:
    """Do all of the work of a turn that has no limit."""
    try:
        next(work)
    except StopIteration as end:
        return end.value
    raise AssertionError("the turn is over")


# --- CUDA graphs: launching a forward of a short prompt from Python takes longer than the forward itself ---


class PromptGraphs(GraphCache[tuple[torch.cuda.CUDAGraph, Any, Texts, Texts]]):
    """Captured forwards over prompts, for each model and each shape of a batch."""

    hindered = "prompts are not read by CUDA graphs, which takes longer"

    def __init__(self, models: Collection[nn.Module]):
        """The models must take masks of all pairs of tokens, as those do that work with slots."""
        super().__init__(on=True)
        self._models = set(models)

    def read(
        self,
        key: tuple[nn.Module, Hashable],
        read: Callable[[Tensor, Tensor], T],
        input_ids: Texts,
        attention_mask: Texts,
    ) -> T | None:
        """Read prompts by a graph, or return None; `key` is the model, and what else changes what `read` does."""
        if key[0] not in self._models or not input_ids.is_cuda or input_ids.numel() > MOST_TOKENS:
            return None
        gap = -input_ids.shape[1] % STEP
        batch = F.pad(input_ids, (gap, 0)), F.pad(attention_mask, (gap, 0))
        shape = (*key, *batch[0].shape)
        if shape not in self._warm and len(self._warm) >= MOST_SHAPES:
            return None

        def capture() -> tuple[torch.cuda.CUDAGraph, T, Texts, Texts]:
            copies = batch[0].clone(), batch[1].clone()
            return *record(lambda: read(*copies)), *copies

        captured = self.find(shape, shape, capture)
        if captured is None:
            return None
        graph, result, *copies = captured
        for copy, values in zip(copies, batch, strict=True):
            copy.copy_(values)
        graph.replay()
        return result
