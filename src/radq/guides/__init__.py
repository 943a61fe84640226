"""Guides: what a host adds to the base model's logits, token by token. One file each; `base` says what a guide is."""

from radq.guides.base import Guide, SumGuide
from radq.guides.dexperts import DExpertsGuide
from radq.guides.gedi import GeDiGuide
from radq.guides.reward import RewardGuide

__all__ = ["DExpertsGuide", "GeDiGuide", "Guide", "RewardGuide", "SumGuide"]
