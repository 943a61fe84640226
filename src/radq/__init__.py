"""radq: a small reward model steers a large frozen language model, token by token.

The names in `__all__` are imported on first use, so that `import radq` is instant and does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

from radq.models.auto import register_reward_models

__version__ = "0.1.0"

if TYPE_CHECKING:
    from radq.decoding.best_of_n import best_of_n
    from radq.decoding.config import LogitChanges, Steering
    from radq.decoding.engine import Engine
    from radq.decoding.generate import Generation, astream_text, generate, stream, stream_text
    from radq.decoding.request import Request
    from radq.errors import RadqError
    from radq.guides.base import Guide
    from radq.guides.dexperts import DExpertsGuide
    from radq.guides.gedi import GeDiGuide
    from radq.guides.meter import Meter
    from radq.guides.reward import RewardGuide
    from radq.guides.spec import load_guide
    from radq.hosts.transformers import GuidedLogitsProcessor
    from radq.models.config import RewardModelConfig
    from radq.models.convert import save_token_classifier
    from radq.models.kinds import RadQ, RadV
    from radq.models.loading import load
    from radq.models.reward import RewardModel
    from radq.report.notebook import Evaluation, evaluate
    from radq.training.config import ExpertTrainingConfig, RewardTrainingConfig
    from radq.training.experts import train_experts
    from radq.training.outcome import push_to_hub
    from radq.training.reward import train
    from radq.training.reward_trainer import RewardTrainer

_HOME = {
    "Generation": "radq.decoding.generate",
    "generate": "radq.decoding.generate",
    "stream": "radq.decoding.generate",
    "stream_text": "radq.decoding.generate",
    "astream_text": "radq.decoding.generate",
    "Engine": "radq.decoding.engine",
    "Request": "radq.decoding.request",
    "LogitChanges": "radq.decoding.config",
    "Steering": "radq.decoding.config",
    "RadqError": "radq.errors",
    "train_experts": "radq.training.experts",
    "DExpertsGuide": "radq.guides.dexperts",
    "GeDiGuide": "radq.guides.gedi",
    "Guide": "radq.guides.base",
    "RewardGuide": "radq.guides.reward",
    "GuidedLogitsProcessor": "radq.hosts.transformers",
    "load": "radq.models.loading",
    "load_guide": "radq.guides.spec",
    "Meter": "radq.guides.meter",
    "RadQ": "radq.models.kinds",
    "RadV": "radq.models.kinds",
    "RewardModelConfig": "radq.models.config",
    "RewardModel": "radq.models.reward",
    "best_of_n": "radq.decoding.best_of_n",
    "push_to_hub": "radq.training.outcome",
    "save_token_classifier": "radq.models.convert",
    "train": "radq.training.reward",
    "ExpertTrainingConfig": "radq.training.config",
    "RewardTrainingConfig": "radq.training.config",
    "RewardTrainer": "radq.training.reward_trainer",
    "Evaluation": "radq.report.notebook",
    "evaluate": "radq.report.notebook",
}

__all__ = [
    "DExpertsGuide",
    "Engine",
    "Evaluation",
    "ExpertTrainingConfig",
    "GeDiGuide",
    "Generation",
    "Guide",
    "GuidedLogitsProcessor",
    "LogitChanges",
    "Meter",
    "RadQ",
    "RadV",
    "RadqError",
    "Request",
    "RewardGuide",
    "RewardModel",
    "RewardModelConfig",
    "RewardTrainer",
    "RewardTrainingConfig",
    "Steering",
    "astream_text",
    "best_of_n",
    "evaluate",
    "generate",
    "load",
    "load_guide",
    "push_to_hub",
    "save_token_classifier",
    "stream",
    "stream_text",
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
