"""A guide that measures the time it takes."""

import time
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from radq.guides.base import Advice, BaseStates, Guide
from radq.models.reading import Reader


class ClockedGuide(Guide):
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

    def check_base(self, lm: Any) -> None:
        self.guide.check_base(lm)

    def start(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None = None) -> Any:
        return self._timed(self.guide.start, input_ids, attention_mask)

    def start_beside(self, base: BaseStates, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"]) -> Any:
        return self._timed(self.guide.start_beside, base, input_ids, attention_mask)

    def advise(self, state: Any, candidates: Int[Tensor, "b k"], beta: Float[Tensor, "b s"] | None = None) -> Advice:
        return self._timed(self.guide.advise, state, candidates, beta)

    def advance(self, state: Any, tokens: Int[Tensor, " b"]) -> Any:
        return self._timed(self.guide.advance, state, tokens)

    def _timed(self, work: Any, *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            self._spent["seconds"] += time.perf_counter() - began
