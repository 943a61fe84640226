"""Single steps of decoding, and guides whose advice one can work out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radq.decoding.steering import Proposal, RowSettings, Steering, propose
from radq.guides.base import Advice, Guide
from radq.models.reading import Reader


def propose_all(logits: Tensor, guide: Guide | None, state: Any, steering: Steering) -> Proposal:
    """Propose with the same steering for every row."""
    return propose(logits, guide, state, RowSettings.repeat(steering, guide, logits))


@dataclass(frozen=True)
class NoState:
    """The state of a guide that reads nothing."""

    def select(self, rows: Tensor) -> "NoState":
        return self

    def map_readings(self, change: Any) -> "NoState":
        return self

    def rewind(self, n: int) -> "NoState":
        return self

    @staticmethod
    def join(states: "Sequence[NoState]") -> "NoState":
        return states[0]


class ConstantGuide(Guide):
    """Adds fixed numbers to the tokens' logits, and allows a fixed set of candidates, whatever the text."""

    readers: Sequence[Reader] = ()
    beta = ()

    def __init__(self, shift: Tensor, allowed: list[bool] | None = None):
        self.values = shift
        self.allowed = None if allowed is None else lambda logits: torch.tensor([allowed])

    def start(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> NoState:
        return NoState()

    def advise(self, state: NoState, candidates: Tensor, beta: Tensor | None = None) -> Advice:
        return Advice(self.values[candidates], state, allowed=self.allowed)

    def advance(self, state: NoState, tokens: Tensor) -> NoState:
        return state
