"""The guide of reward models: RAD-Q and RAD-V."""

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from radq.errors import ContextLengthError, OptionError, UnknownAttributeError
from radq.guides.base import Guide
from radq.models.kv_cache import check_padding, takes_padding, takes_siblings
from radq.models.lora import fold_adapters
from radq.models.reward import RadV, RewardModel, RewardState
from radq.models.vocabulary import check_vocabulary, find_special_tokens


@final
class RewardGuide(Guide):
    """Σ_a β_a · clamp(r̂_a(v | x)). β is signed: a negative weight steers away from the attribute.

    Rewards are clamped to the range of the training responses, unless `clamp=False`. A token that the reward model does
    not know has the reward of the prefix itself, so that neither sign of β favours it.
    """

    def __init__(self, model: RewardModel, weights: Mapping[str, float], clamp: bool = True):
        unknown = [name for name in weights if name not in model.config.attributes]
        if unknown:
            raise UnknownAttributeError(
                f"the reward model has no attribute {unknown[0]!r}.", f"it has {', '.join(model.config.attributes)}."
            )
        if not weights or not all(math.isfinite(weight) for weight in weights.values()):
            raise OptionError(
                f"weights are {dict(weights)!r}.", "give at least one attribute, each with a finite weight."
            )
        self.model = model.eval()
        fold_adapters(model.backbone)
        self.weights = dict(weights)
        self.clamp = clamp
        self.vocab_size = model.num_known
        takes_padding(model.backbone)  # tried here, so that the trial is no part of a first step
        if isinstance(model, RadV):
            takes_siblings(model.backbone)
        self._columns = [model.config.attributes.index(name) for name in weights]

    def start(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None = None) -> RewardState:
        device = self.model.device
        return self.model.read(input_ids.to(device), None if attention_mask is None else attention_mask.to(device))

    def shift(self, state: RewardState, candidates: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        rewards = self.model.score(state, candidates.to(self.model.device))[..., self._columns]  # (b, k, a)
        if self.clamp:
            rewards = rewards.clamp(*self._bounds(rewards))
        beta = torch.tensor(list(self.weights.values()), dtype=rewards.dtype, device=rewards.device)
        return (rewards @ beta).to(candidates.device)

    def advance(self, state: RewardState, tokens: Int[Tensor, " b"]) -> RewardState:
        return self.model.advance(state, tokens.to(self.model.device))

    def select(self, state: RewardState, rows: Int[Tensor, " r"]) -> RewardState:
        return state.select(rows)

    def join(self, states: Sequence[RewardState]) -> RewardState:
        check_padding(self.model.backbone)
        return RewardState.join(states)

    def rewind(self, state: RewardState, n: int) -> RewardState:
        return self.model.rewind(state, n)

    def clipped(self, state: RewardState) -> Bool[Tensor, "b k"] | None:
        if not self.clamp or state.scored is None:
            return None
        rewards = state.scored.rewards[..., self._columns]
        low, high = self._bounds(rewards)
        return ((rewards < low) | (rewards > high)).any(-1)

    def _bounds(self, rewards: Float[Tensor, "b k a"]) -> Float[Tensor, "2 a"]:
        """The lowest and the highest training response of each attribute that is guided by."""
        ranges = self.model.config.attribute_ranges
        return torch.tensor([ranges[n] for n in self._columns], dtype=rewards.dtype, device=rewards.device).T

    @property
    def experts(self) -> list[nn.Module]:
        return [self.model.backbone]

    @property
    def special_tokens(self) -> set[int]:
        return find_special_tokens(self.model.backbone.config, self.model.tokenizer)

    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        check_vocabulary(self.model.vocabulary, base_size, tokenizer, base_name)

    def check_length(self, num_tokens: int) -> None:
        limit = self.model.max_tokens
        if limit is not None and num_tokens > limit:
            raise ContextLengthError(
                f"prompt and new tokens are {num_tokens} tokens, but the reward model has room for {limit}.",
                "shorten the prompt or lower max_new_tokens.",
            )
