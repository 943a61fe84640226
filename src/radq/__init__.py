"""radq: a small reward model steers a large frozen language model, token by token.

The names in `__all__` are imported on first use, so that `import radq` is instant and does not import torch.
"""

import importlib
from typing import TYPE_CHECKING

from radq.models.auto import register_reward_models

__version__ = "0.1.0"

if TYPE_CHECKING:  # `as` makes a name public for type checkers
    from radq.decoding.best_of_n import best_of_n as best_of_n
    from radq.decoding.config import LogitChanges as LogitChanges
    from radq.decoding.config import Steering as Steering
    from radq.decoding.engine import Engine as Engine
    from radq.decoding.generate import Generation as Generation
    from radq.decoding.generate import astream_text as astream_text
    from radq.decoding.generate import generate as generate
    from radq.decoding.generate import stream as stream
    from radq.decoding.generate import stream_text as stream_text
    from radq.decoding.request import Request as Request
    from radq.errors import RadqError as RadqError
    from radq.guides.base import Guide as Guide
    from radq.guides.dexperts import DExpertsGuide as DExpertsGuide
    from radq.guides.gedi import GeDiGuide as GeDiGuide
    from radq.guides.meter import Meter as Meter
    from radq.guides.reward import RewardGuide as RewardGuide
    from radq.guides.spec import load_guide as load_guide
    from radq.hosts.transformers import GuidedLogitsProcessor as GuidedLogitsProcessor
    from radq.models.config import RewardModelConfig as RewardModelConfig
    from radq.models.convert import save_token_classifier as save_token_classifier
    from radq.models.kinds import RadQ as RadQ
    from radq.models.kinds import RadV as RadV
    from radq.models.loading import load as load
    from radq.models.reward import RewardModel as RewardModel
    from radq.report.notebook import Evaluation as Evaluation
    from radq.report.notebook import evaluate as evaluate
    from radq.training.config import ExpertTrainingConfig as ExpertTrainingConfig
    from radq.training.config import RewardTrainingConfig as RewardTrainingConfig
    from radq.training.experts import train_experts as train_experts
    from radq.training.outcome import push_to_hub as push_to_hub
    from radq.training.reward import train as train
    from radq.training.reward_trainer import RewardTrainer as RewardTrainer

_NAMES = {  # by their modules
    "radq.decoding.best_of_n": ["best_of_n"],
    "radq.decoding.config": ["LogitChanges", "Steering"],
    "radq.decoding.engine": ["Engine"],
    "radq.decoding.generate": ["Generation", "astream_text", "generate", "stream", "stream_text"],
    "radq.decoding.request": ["Request"],
    "radq.errors": ["RadqError"],
    "radq.guides.base": ["Guide"],
    "radq.guides.dexperts": ["DExpertsGuide"],
    "radq.guides.gedi": ["GeDiGuide"],
    "radq.guides.meter": ["Meter"],
    "radq.guides.reward": ["RewardGuide"],
    "radq.guides.spec": ["load_guide"],
    "radq.hosts.transformers": ["GuidedLogitsProcessor"],
    "radq.models.config": ["RewardModelConfig"],
    "radq.models.convert": ["save_token_classifier"],
    "radq.models.kinds": ["RadQ", "RadV"],
    "radq.models.loading": ["load"],
    "radq.models.reward": ["RewardModel"],
    "radq.report.notebook": ["Evaluation", "evaluate"],
    "radq.training.config": ["ExpertTrainingConfig", "RewardTrainingConfig"],
    "radq.training.experts": ["train_experts"],
    "radq.training.outcome": ["push_to_hub"],
    "radq.training.reward": ["train"],
    "radq.training.reward_trainer": ["RewardTrainer"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'radq' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


register_reward_models()
