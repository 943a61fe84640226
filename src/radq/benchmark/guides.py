"""The guides of a benchmark by name. Their models have one shape, so that only the ways of steering differ."""

from collections.abc import Callable
from dataclasses import dataclass

from radq.benchmark.models import BenchModels
from radq.benchmark.naive import SeparateForwards, WholeVocabulary
from radq.guides import DExpertsGuide, GeDiGuide, Guide, RewardGuide
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
