"""Naive ways to compute the same rewards as radq's guides, to compare times with.

Axes: b batch, t time, k candidates, v vocabulary, s strengths.
"""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from radq.guides.base import Advice, Guide
from radq.guides.reward import RewardGuide
from radq.models.reading import Reader, Reading


class NaiveGuide(Guide[Reading]):
    """A reward guide whose candidates are scored in another way. Subclasses implement `advise`."""

    capturable = True

    def __init__(self, guide: RewardGuide):
        self.guide, self.beta = guide, guide.beta

    @property
    def readers(self) -> list[Reader]:
        return self.guide.readers

    def start(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None = None) -> Reading:
        return self.guide.start(input_ids, attention_mask)

    def advance(self, state: Reading, tokens: Int[Tensor, " b"]) -> Reading:
        return self.guide.advance(state, tokens)


@final
class SeparateForwards(NaiveGuide):
    """RAD-V with a forward for every candidate, and one more for the chosen token.

    The prefix is not read again: every forward uses its keys and values.
    """

    def advise(
        self, state: Reading, candidates: Int[Tensor, "b k"], beta: Float[Tensor, "b s"] | None = None
    ) -> Advice:
        shifts = [self.guide.advise(state, column, beta).shift for column in candidates.split(1, dim=1)]
        return Advice(torch.cat(shifts, dim=1), state.drop_siblings())


@final
class WholeVocabulary(NaiveGuide):
    """RAD-Q that computes the rewards of all tokens, and then picks those of the candidates.

    It steers one attribute, and the base model must have the tokens of the reward model and no others.
    """

    def __init__(self, guide: RewardGuide):
        super().__init__(guide)
        (attribute,) = guide.attributes
        self.column = guide.model.config.attributes.index(attribute)
        self.low, self.high = guide.model.config.attribute_ranges[self.column]

    def advise(
        self, state: Reading, candidates: Int[Tensor, "b k"], beta: Float[Tensor, "b s"] | None = None
    ) -> Advice:
        rewards, state = self.guide.model.score(state)  # (b, v, a)
        chosen = rewards[..., self.column].gather(1, candidates).clamp(self.low, self.high)  # (b, k)
        return Advice(self.beta_rows(beta, chosen) * chosen, state)
