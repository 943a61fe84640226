"""Guides: what a host adds to the base model's logits, token by token. Guides add up: `guide_a + guide_b`.

A guide holds no state of a generation. The host keeps what `start`, `advance`, `select`, `join` and `rewind` return,
one state per batch of prefixes: nothing to reset, nothing left over from an earlier prompt.

A base model may have tokens that a guide does not know, such as those of a chat format. They stay candidates. A guide
leaves them out of what it reads, and its shift of such a token is that of a token which changes nothing.

Axes: b batch, t time, k candidates, a attributes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase


class Guide(ABC):
    """What a host sees. `State` is whatever the guide returns; only the guide looks inside."""

    vocab_size: int  # tokens with smaller ids are known to the guide

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
    def select(self, state: Any, rows: Int[Tensor, " r"]) -> Any:
        """The given rows, in that order and maybe several times: samples, beams, batches whose finished rows leave."""

    @abstractmethod
    def join(self, states: Sequence[Any]) -> Any:
        """The rows of several states as one batch, in that order: requests that come while others run."""

    @abstractmethod
    def rewind(self, state: Any, n: int) -> Any:
        """The state before the last n tokens of every row, all of them known to the guide."""

    def clipped(self, state: Any) -> Bool[Tensor, "b k"] | None:
        """Which of the candidates last scored had a reward clamped; None where the guide clamps nothing."""
        return None

    def allowed(
        self, state: Any, candidates: Int[Tensor, "b k"], logits: Float[Tensor, "b k"]
    ) -> Bool[Tensor, "b k"] | None:
        """Which candidates may be chosen, given their logits with all shifts; None where the guide forbids nothing.

        Where a row would be left with none, it keeps them all.
        """
        return None

    @property
    def experts(self) -> list[nn.Module]:
        """The transformers that the guide runs: what `radq.guides.meter` counts the calls of."""
        return []

    @property
    def special_tokens(self) -> set[int]:
        """Ids that mark beginnings, ends and padding, by which a host without a mask can tell that texts are padded."""
        return set()

    @abstractmethod
    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        """Raise if the base model's token ids mean something else than the guide's."""

    @abstractmethod
    def check_length(self, num_tokens: int) -> None:
        """Raise if the guide cannot follow a text of so many tokens."""

    def __add__(self, other: "Guide") -> "Guide":
        return SumGuide(self, other)


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

    def select(self, state: list[Any], rows: Int[Tensor, " r"]) -> list[Any]:
        return [guide.select(part, rows) for guide, part in self._parts(state)]

    def join(self, states: Sequence[list[Any]]) -> list[Any]:
        return [guide.join(parts) for guide, *parts in zip(self.guides, *states, strict=True)]

    def rewind(self, state: list[Any], n: int) -> list[Any]:
        return [guide.rewind(part, n) for guide, part in self._parts(state)]

    def clipped(self, state: list[Any]) -> Bool[Tensor, "b k"] | None:
        known = [c for c in (guide.clipped(part) for guide, part in self._parts(state)) if c is not None]
        return torch.stack([clipped.to(known[0].device) for clipped in known]).any(0) if known else None

    def allowed(
        self, state: list[Any], candidates: Int[Tensor, "b k"], logits: Float[Tensor, "b k"]
    ) -> Bool[Tensor, "b k"] | None:
        sets = (guide.allowed(part, candidates, logits) for guide, part in self._parts(state))
        known = [allowed for allowed in sets if allowed is not None]
        return torch.stack(known).all(0) if known else None

    @property
    def experts(self) -> list[nn.Module]:
        return [expert for guide in self.guides for expert in guide.experts]

    @property
    def special_tokens(self) -> set[int]:
        return {token for guide in self.guides for token in guide.special_tokens}

    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        for guide in self.guides:
            guide.check_vocabulary(base_size, tokenizer, base_name)

    def check_length(self, num_tokens: int) -> None:
        for guide in self.guides:
            guide.check_length(num_tokens)

    def _parts(self, state: list[Any]) -> Iterable[tuple[Guide, Any]]:
        return zip(self.guides, state, strict=True)
