"""The state of a reward model after a batch of prefixes.

Axes: b batch, k candidates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class RewardState:
    """A reward model's state after a batch of prefixes."""

    # a Reading, a SlotReading, a Glance or a BaseReading; its last output is the hidden state at the last token,
    # or, for a readout, the states of some layers there
    reading: Any
    candidates: Int[Tensor, "b k"] | None = None  # those that RAD-V has read after the prefix,
    siblings: Any = None  # with which it can go on without another forward

    @property
    def all_known(self) -> bool:
        """Whether the reward model knows every token that may be a candidate."""
        return isinstance(self.reading, BaseReading) and self.reading.all_known

    def select(self, rows: Int[Tensor, " r"]) -> "RewardState":
        rows = rows.to(self.reading.last.device)
        if self.candidates is None or self.siblings is None:
            return RewardState(self.reading.select(rows))
        return RewardState(self.reading.select(rows), self.candidates[rows], self.siblings.select(rows))

    @staticmethod
    def join(states: "Sequence[RewardState]") -> "RewardState":
        readings: list[Any] = [state.reading for state in states]
        return RewardState(readings[0].join(readings))

    def map_readings(self, change: Callable[[Any], Any]) -> "RewardState":
        return RewardState(self.reading.map_readings(change))

    def rewind(self, n: int) -> "RewardState":
        return RewardState(self.reading.rewind(n))


@dataclass(frozen=True)
class BaseReading:
    """The states of a base model that the host runs and keeps up to date, so that no method has to change anything."""

    states: Callable[[], Float[Tensor, "b n"]]  # of the last token of each text, whatever the texts are by now
    all_known: bool = False  # whether the reward model knows all tokens of the base model

    @property
    def last(self) -> Float[Tensor, "b n"]:
        return self.states()

    def select(self, rows: Int[Tensor, " r"]) -> "BaseReading":
        return self

    @staticmethod
    def join(readings: "Sequence[BaseReading]") -> "BaseReading":
        return readings[0]

    def map_readings(self, change: Callable[[Any], Any]) -> "BaseReading":
        return self

    def rewind(self, n: int) -> "BaseReading":
        return self

    def advance(self, tokens: Int[Tensor, " b"]) -> "BaseReading":
        return self
