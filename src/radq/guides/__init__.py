"""Guides compute what is added to the base model's logits, token by token. `base` has their protocol.

The names in `__all__` are imported on first use, since `radq.guides.spec` checks guides before torch is imported.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radq.guides.base import Guide, SumGuide
    from radq.guides.dexperts import DExpertsGuide
    from radq.guides.gedi import GeDiGuide
    from radq.guides.reward import RewardGuide

_HOME = {
    "DExpertsGuide": "radq.guides.dexperts",
    "GeDiGuide": "radq.guides.gedi",
    "Guide": "radq.guides.base",
    "RewardGuide": "radq.guides.reward",
    "SumGuide": "radq.guides.base",
}

__all__ = ["DExpertsGuide", "GeDiGuide", "Guide", "RewardGuide", "SumGuide"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'radq.guides' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
