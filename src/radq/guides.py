"""Guides: what a host adds to the base model's logits, token by token. Guides add up: `guide_a + guide_b`.

A guide holds no state of a generation. The host keeps what `start`, `advance`, `fork`, `select` and `rewind` return,
one state per batch of prefixes: nothing to reset, nothing left over from an earlier prompt.

Axes: b batch, t time, k candidates, a attributes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from radq.errors import ContextLengthError, OptionError, UnknownAttributeError
from radq.models import RewardModel, RewardState
from radq.vocabulary import check_vocabulary


class Guide(ABC):
    """What a host sees. `State` is whatever the guide returns; only the guide looks inside."""

    vocab_size: int  # candidates must be smaller

    @abstractmethod
    def start(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None = None) -> Any:
        """The state after a batch of prompts."""

    @abstractmethod
    def shift(self, state: Any, candidates: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        """What to add to the candidates' base logits."""

    @abstractmethod
    def advance(self, state: Any, tokens: Int[Tensor, " b"]) -> Any:
        """The state after one more token per row."""

    @abstractmethod
    def fork(self, state: Any, n: int) -> Any:
        """Every row n times, copies side by side: n samples of each prompt."""

    @abstractmethod
    def select(self, state: Any, rows: Int[Tensor, " r"]) -> Any:
        """The given rows, in that order: beams, and batches whose finished rows leave."""

    @abstractmethod
    def rewind(self, state: Any, n: int) -> Any:
        """The state before the last n tokens of every row."""

    def clipped(self, state: Any) -> Bool[Tensor, "b k"] | None:
        """Which of the candidates last scored had a reward clamped; None where the guide clamps nothing."""
        return None

    @abstractmethod
    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        """Raise if the base model's token ids mean something else than the guide's."""

    @abstractmethod
    def check_length(self, num_tokens: int) -> None:
        """Raise if the guide cannot follow a text of so many tokens."""

    def __add__(self, other: "Guide") -> "Guide":
        return SumGuide(self, other)


@final
class RewardGuide(Guide):
    """Σ_a β_a · clamp(r̂_a(v | x)). β is signed: a negative weight steers away from the attribute.

    Rewards are clamped to the range of the training responses, unless `clamp=False`.
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
        self.weights = dict(weights)
        self.clamp = clamp
        self.vocab_size = model.vocabulary.num_tokens or model.vocabulary.size
        self._columns = [model.config.attributes.index(name) for name in weights]

    def start(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None = None) -> RewardState:
        device = self.model.device
        return self.model.read(input_ids.to(device), None if attention_mask is None else attention_mask.to(device))

    def shift(self, state: RewardState, candidates: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        rewards = self.model.score(state, candidates.to(self.model.device))[..., self._columns]  # (b, k, a)
        if self.clamp:
            rewards = rewards.clamp(*self.model.config.response_range)
        beta = torch.tensor(list(self.weights.values()), dtype=rewards.dtype, device=rewards.device)
        return (rewards @ beta).to(candidates.device)

    def advance(self, state: RewardState, tokens: Int[Tensor, " b"]) -> RewardState:
        return self.model.advance(state, tokens.to(self.model.device))

    def fork(self, state: RewardState, n: int) -> RewardState:
        return state.fork(n)

    def select(self, state: RewardState, rows: Int[Tensor, " r"]) -> RewardState:
        return state.select(rows)

    def rewind(self, state: RewardState, n: int) -> RewardState:
        return self.model.rewind(state, n)

    def clipped(self, state: RewardState) -> Bool[Tensor, "b k"] | None:
        if not self.clamp or state.scored is None:
            return None
        low, high = self.model.config.response_range
        rewards = state.scored.rewards[..., self._columns]
        return ((rewards < low) | (rewards > high)).any(-1)

    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        check_vocabulary(self.model.vocabulary, base_size, tokenizer, base_name)

    def check_length(self, num_tokens: int) -> None:
        limit = self.model.max_tokens
        if limit is not None and num_tokens > limit:
            raise ContextLengthError(
                f"prompt and new tokens are {num_tokens} tokens, but the reward model has room for {limit}.",
                "shorten the prompt or lower max_new_tokens.",
            )


@final
class SumGuide(Guide):
    """The sum of several guides; what `+` makes."""

    def __init__(self, *guides: Guide):
        self.guides = [part for guide in guides for part in (guide.guides if isinstance(guide, SumGuide) else [guide])]
        self.vocab_size = min(guide.vocab_size for guide in self.guides)

    def start(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None = None) -> list[Any]:
        return [guide.start(input_ids, attention_mask) for guide in self.guides]

    def shift(self, state: list[Any], candidates: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        return torch.stack([guide.shift(part, candidates) for guide, part in self._parts(state)]).sum(0)

    def advance(self, state: list[Any], tokens: Int[Tensor, " b"]) -> list[Any]:
        return [guide.advance(part, tokens) for guide, part in self._parts(state)]

    def fork(self, state: list[Any], n: int) -> list[Any]:
        return [guide.fork(part, n) for guide, part in self._parts(state)]

    def select(self, state: list[Any], rows: Int[Tensor, " r"]) -> list[Any]:
        return [guide.select(part, rows) for guide, part in self._parts(state)]

    def rewind(self, state: list[Any], n: int) -> list[Any]:
        return [guide.rewind(part, n) for guide, part in self._parts(state)]

    def clipped(self, state: list[Any]) -> Bool[Tensor, "b k"] | None:
        known = [c for c in (guide.clipped(part) for guide, part in self._parts(state)) if c is not None]
        return torch.stack([clipped.to(known[0].device) for clipped in known]).any(0) if known else None

    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        for guide in self.guides:
            guide.check_vocabulary(base_size, tokenizer, base_name)

    def check_length(self, num_tokens: int) -> None:
        for guide in self.guides:
            guide.check_length(num_tokens)

    def _parts(self, state: list[Any]) -> Iterable[tuple[Guide, Any]]:
        return zip(self.guides, state, strict=True)
