"""The guide of reward models: RAD-Q and RAD-V."""

import math
from collections.abc import Mapping
from functools import partial
from typing import final

import torch

from radq.errors import OptionError
from radq.guides.base import Advice, Guide, Prompts
from radq.models.kinds import RadV
from radq.models.kv_cache import takes_padding, takes_siblings
from radq.models.loading import Wrappable, find_backbone
from radq.models.lora import fold_adapters
from radq.models.prefill import InTurns
from radq.models.reading import OutputReading, Reader, Reading
from radq.models.readout import check_base
from radq.models.reward import RewardModel
from radq.models.slots import takes_slots
from radq.numerics import Candidates, Strengths, Tokens, at_least_float32, constant
from radq.sources.model_source import require_attributes


@final
class RewardGuide(Guide[Reading]):
    """shift(v) = Σ_a β_a · clamp(r̂_a(v | x)). β is signed: a negative one steers away from the attribute.

    Rewards are clamped to the range of the training labels, unless `clamp=False`. A token that the reward model does
    not know has the reward of the prefix itself, so that neither sign of β favours it.
    """

    capturable = True

    def __init__(self, model: RewardModel, beta: Mapping[str, float], clamp: bool = True):
        require_attributes(beta, model.config.attributes)
        if any(isinstance(number, str) for number in beta.values()):
            raise OptionError(
                f"beta must be numbers, got {dict(beta)!r}.",
                "radq.load_guide reads strengths, such as 'DIR:attribute=strong'.",
            )
        if not beta or not all(math.isfinite(number) for number in beta.values()):
            raise OptionError(
                f"beta must give one or more attributes a finite number each, got {dict(beta)!r}.",
                f"the reward model has {', '.join(model.config.attributes)}.",
            )
        self.model = model.eval()
        fold_adapters(model.backbone)
        self.attributes, self.beta = tuple(beta), tuple(beta.values())
        self.clamp = clamp
        takes_padding(model.backbone)  # tried here, so that trials are no part of a first step
        takes_slots(model.reader)
        if isinstance(model, RadV):
            takes_siblings(model.backbone)
        self.columns = tuple(model.config.attributes.index(name) for name in beta)  # of the model's attributes
        ranges = [model.config.attribute_ranges[column] for column in self.columns]
        self._low, self._high = zip(*ranges, strict=True)  # s numbers each

    @property
    def readers(self) -> list[Reader]:
        return [self.model.reader]

    def check_base(self, lm: Wrappable) -> None:
        if self.model.readout is not None:  # one that shares the base model, too: it may have been trained since
            check_base(self.model.readout.sketch, find_backbone(lm, type(lm).__name__))

    def start_in_turns(self, prompts: Prompts) -> InTurns[Reading]:
        layers, device, base = self.model.reader.base_layers, self.model.device, prompts.base
        if base is not None and layers:
            self.model.notice_changes()
            all_known = base.num_tokens <= self.model.vocabulary.num_known
            return OutputReading(self.model.reader, partial(base.take, layers), all_known=all_known)
        mask = None if prompts.attention_mask is None else prompts.attention_mask.to(device)
        return (yield from self.model.read_in_turns(prompts.input_ids.to(device), mask, prompts.turn))

    def advise(self, state: Reading, candidates: Candidates, beta: Strengths | None = None) -> Advice:
        rewards, state = self.model.score(state, candidates.to(self.model.device))
        rewards = at_least_float32(rewards)  # a strength times a reward may leave the range of half precision
        if self.columns != tuple(range(rewards.shape[2])):
            rewards = rewards.index_select(2, constant(self.columns, torch.long, rewards.device))  # (b, k, s)
        clipped = None
        if self.clamp:
            free = rewards
            low, high = (constant(ends, rewards.dtype, rewards.device) for ends in (self._low, self._high))
            rewards = free.clamp(low, high)
            changed = free != rewards
            clipped = (changed[..., 0] if changed.shape[2] == 1 else changed.any(-1)).to(candidates.device)
        shift = torch.einsum("bks,bs->bk", rewards, self.beta_rows(beta, rewards))
        return Advice(shift.to(candidates.device), state, clipped, (rewards,))

    def advance(self, state: Reading, tokens: Tokens) -> Reading:
        return state.advance(tokens.to(self.model.device))
