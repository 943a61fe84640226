"""Checkpoints in the layouts of the public RAD and rad-q code, and one that would run code."""

import os
from pathlib import Path
from typing import Any

import torch
from families import make_lm
from torch import Tensor, nn
from transformers import PreTrainedModel


class PublicRad(nn.Module):
    """RAD: a language model whose output layer was replaced by a linear head."""

    def __init__(self, family: str, outputs: int):
        super().__init__()
        self.model: PreTrainedModel = make_lm(family)
        torch.manual_seed(3)
        self.model.lm_head = nn.Linear(self.model.config.hidden_size, outputs)

    def rewards(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits  # (b, t, a)


class PublicRadQ(nn.Module):
    """rad-q: a language model with its output layer, and a projection and a baseline beside it."""

    def __init__(self, family: str, outputs: int, baseline: bool = True):
        super().__init__()
        self.model: PreTrainedModel = make_lm(family)
        d = self.model.config.hidden_size
        torch.manual_seed(4)
        self.head = nn.Module()
        self.head.lm_projection = nn.Linear(d, d * outputs, bias=False)
        if baseline:
            self.head.prefix_baseline = nn.Linear(d, outputs, bias=False)

    def rewards(self, ids: Tensor) -> Tensor:
        """Rewards of all tokens but the BOS that the ids begin with."""
        hidden = self.model.base_model(input_ids=ids).last_hidden_state[:, :-1]
        projected = self.head.lm_projection(hidden).unflatten(-1, (-1, hidden.shape[-1]))  # (b, t, a, d)
        whole = projected @ self.model.lm_head.weight.T  # (b, t, a, v)
        index = ids[:, 1:, None, None].expand(-1, -1, whole.shape[2], 1)
        rewards = whole.gather(3, index).squeeze(3)
        return rewards + self.head.prefix_baseline(hidden) if hasattr(self.head, "prefix_baseline") else rewards


def config_folder(family: str, folder: Path) -> Path:
    make_lm(family).config.save_pretrained(folder)
    return folder


class RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("touch was-run",)
