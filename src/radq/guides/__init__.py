"""Guides compute what is added to the base model's logits, token by token. `base` has their protocol."""

from radq.guides.base import Guide, SumGuide
from radq.guides.dexperts import DExpertsGuide
from radq.guides.gedi import GeDiGuide
from radq.guides.reward import RewardGuide

__all__ = ["DExpertsGuide", "GeDiGuide", "Guide", "RewardGuide", "SumGuide"]
