"""A guide that measures the time it takes."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxtyping import Float, Int
from torch import Tensor

from radq.guides.base import Advice, Guide, Prompts, State
from radq.models.loading import Wrappable
from radq.models.prefill import InTurns, surround
from radq.models.reading import Reader


class ClockedGuide(Guide[State]):
    """A guide that does what another does, and sums up the seconds. On a GPU, work that is under way is not counted."""

    def __init__(self, guide: Guide):
        self.guide, self.beta, self.capturable = guide, guide.beta, guide.capturable
        self._spent = {"seconds": 0.0}  # not a number of this object: engines notice when a guide's numbers change

    @property
    def seconds(self) -> float:
        return self._spent["seconds"]

    @property
    def readers(self) -> Sequence[Reader]:
        return self.guide.readers

    def check_base(self, lm: Wrappable) -> None:
        self.guide.check_base(lm)

    def start_in_turns(self, prompts: Prompts) -> InTurns[State]:
        return surround(self.guide.start_in_turns(prompts), self._timed)

    def advise(self, state: State, candidates: Int[Tensor, "b k"], beta: Float[Tensor, "b s"] | None = None) -> Advice:
        with self._timed():
            return self.guide.advise(state, candidates, beta)

    def advance(self, state: State, tokens: Int[Tensor, " b"]) -> State:
        with self._timed():
            return self.guide.advance(state, tokens)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent["seconds"] += time.perf_counter() - began
