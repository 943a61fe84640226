"""radq: a small reward model steers a large frozen language model, token by token.

The names below load on first use, so that `import radq` stays instant and imports no torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from radq.decoding import Generation, generate, stream
    from radq.errors import RadqError
    from radq.guides import DExpertsGuide, GeDiGuide, Guide, RewardGuide
    from radq.hosts.hf import GuidedLogitsProcessor
    from radq.models import RadQ, RadV, RewardConfig, RewardModel
    from radq.runs import train
    from radq.settings import RewardTrainingConfig
    from radq.training import RewardTrainer

_HOME = {
    "Generation": "radq.decoding",
    "generate": "radq.decoding",
    "stream": "radq.decoding",
    "RadqError": "radq.errors",
    "DExpertsGuide": "radq.guides",
    "GeDiGuide": "radq.guides",
    "Guide": "radq.guides",
    "RewardGuide": "radq.guides",
    "GuidedLogitsProcessor": "radq.hosts.hf",
    "RadQ": "radq.models",
    "RadV": "radq.models",
    "RewardConfig": "radq.models",
    "RewardModel": "radq.models",
    "RewardTrainer": "radq.training",
    "RewardTrainingConfig": "radq.settings",
    "train": "radq.runs",
}

__all__ = [
    "DExpertsGuide",
    "GeDiGuide",
    "Generation",
    "Guide",
    "GuidedLogitsProcessor",
    "RadQ",
    "RadV",
    "RadqError",
    "RewardConfig",
    "RewardGuide",
    "RewardModel",
    "RewardTrainer",
    "RewardTrainingConfig",
    "generate",
    "stream",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'radq' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
