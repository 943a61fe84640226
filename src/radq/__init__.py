"""radq: a small reward model steers a large frozen language model, token by token.

The names below load on first use, so that `import radq` stays instant and imports no torch.
"""

import importlib
from typing import TYPE_CHECKING

from radq.auto import register_reward_models

__version__ = "0.1.0"

if TYPE_CHECKING:
    from radq.decoding import Generation, generate, stream
    from radq.errors import RadqError
    from radq.expert_training import train_experts
    from radq.guides import DExpertsGuide, GeDiGuide, Guide, RewardGuide
    from radq.hosts.hf import GuidedLogitsProcessor
    from radq.metering import Meter
    from radq.models import RadQ, RadV, RewardConfig, RewardModel
    from radq.reranking import best_of_n
    from radq.runs import train
    from radq.settings import ExpertTrainingConfig, RewardTrainingConfig
    from radq.training import RewardTrainer

_HOME = {
    "Generation": "radq.decoding",
    "generate": "radq.decoding",
    "stream": "radq.decoding",
    "RadqError": "radq.errors",
    "train_experts": "radq.expert_training",
    "DExpertsGuide": "radq.guides",
    "GeDiGuide": "radq.guides",
    "Guide": "radq.guides",
    "RewardGuide": "radq.guides",
    "GuidedLogitsProcessor": "radq.hosts.hf",
    "Meter": "radq.metering",
    "RadQ": "radq.models",
    "RadV": "radq.models",
    "RewardConfig": "radq.models",
    "RewardModel": "radq.models",
    "best_of_n": "radq.reranking",
    "train": "radq.runs",
    "ExpertTrainingConfig": "radq.settings",
    "RewardTrainingConfig": "radq.settings",
    "RewardTrainer": "radq.training",
}

__all__ = [
    "DExpertsGuide",
    "ExpertTrainingConfig",
    "GeDiGuide",
    "Generation",
    "Guide",
    "GuidedLogitsProcessor",
    "Meter",
    "RadQ",
    "RadV",
    "RadqError",
    "RewardConfig",
    "RewardGuide",
    "RewardModel",
    "RewardTrainer",
    "RewardTrainingConfig",
    "best_of_n",
    "generate",
    "stream",
    "train",
    "train_experts",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'radq' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


register_reward_models()
