"""The guides of a benchmark by name. Their models have one shape, so that only the ways of steering differ.

Beside radq's guides stand naive ways to compute the same rewards, to compare times with.
Axes: b batch, t time, k candidates, v vocabulary, s strengths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from radq.benchmark.models import BenchModels
from radq.guides import DExpertsGuide, GeDiGuide, Guide, RewardGuide
from radq.guides.base import Advice
from radq.models.reading import Reader, Reading
from radq.models.reward import RewardModel

CODES = ([2], [3])  # GeDi's control codes, a token each


@dataclass(frozen=True)
class BenchGuide:
    """A guide of the benchmark.

    Args:
        title: its name in tables and plots.
        make: makes it from the models of the benchmark; None stands for no guide.
    """

    title: str
    make: Callable[[BenchModels], Guide | None]


def _steer(model: RewardModel) -> RewardGuide:
    return RewardGuide(model, {model.config.attributes[0]: 1.0})


GUIDES: dict[str, BenchGuide] = {
    "none": BenchGuide("unguided", lambda models: None),
    "q": BenchGuide("RAD-Q", lambda models: _steer(models.rad_q)),
    "naive-q": BenchGuide("RAD-Q naive", lambda models: WholeVocabulary(_steer(models.rad_q))),
    "v": BenchGuide("RAD-V", lambda models: _steer(models.rad_v)),
    "naive-v": BenchGuide("RAD-V naive", lambda models: SeparateForwards(_steer(models.rad_v))),
    "dexperts": BenchGuide("DExperts", lambda models: DExpertsGuide(models.expert, models.anti_expert, 1.0)),
    "gedi": BenchGuide("GeDi", lambda models: GeDiGuide(models.expert, CODES, 1.0)),
}


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
