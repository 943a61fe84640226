"""Tiny DExperts and GeDi guides."""

import copy
from typing import Any

import torch
from families import make_lm
from transformers import PreTrainedModel

from radq.guides.base import Guide
from radq.guides.dexperts import DExpertsGuide
from radq.guides.gedi import GeDiGuide

CODES = ([20, 21], [22])  # of different lengths


def make_experts(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    expert = make_lm(family).double()
    anti_expert = copy.deepcopy(expert)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in anti_expert.parameters():
            parameter.add_(0.3 * parameter.std(correction=0) * torch.randn_like(parameter))
    return expert, anti_expert


def make_guide(method: str, family: str = "gpt2", strength: float = 2.0, **options: Any) -> Guide:
    expert, anti_expert = make_experts(family)
    if method == "dexperts":
        return DExpertsGuide(expert, anti_expert, strength)
    return GeDiGuide(expert, CODES, strength, scale=1.7, prior=0.3, **options)
