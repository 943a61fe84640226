"""DExperts (Liu et al. 2021): two language models, one finetuned on text of an attribute and one on text without."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq.errors import ModelError, OptionError, VocabularyError
from radq.guides.base import Guide
from radq.guides.expert import Expert, ExpertState
from radq.models.loading import find_tokenizer, load_causal_lm

State = tuple[ExpertState, ExpertState]
EXPERT, ANTI_EXPERT = "expert", "anti"  # folders that `radq train-experts` writes


@final
class DExpertsGuide(Guide):
    """shift(v) = α (z⁺(v | x) − z⁻(v | x)), z⁺ and z⁻ the logits of expert and anti-expert.

    α is signed: a negative one steers away from what the expert was trained on. Two forwards of one token per step. A
    token that the experts do not know counts as equally likely for both.
    """

    def __init__(
        self,
        expert: PreTrainedModel,
        anti_expert: PreTrainedModel,
        alpha: float,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        """`tokenizer` is the experts' own: to compare vocabularies token by token and not by size alone."""
        if not math.isfinite(alpha):
            raise OptionError(f"alpha is {alpha}.", "give a finite number.")
        self.expert, self.anti_expert = Expert(expert, tokenizer), Expert(anti_expert, tokenizer)
        if self.expert.vocabulary != self.anti_expert.vocabulary:
            raise VocabularyError(
                f"the expert has {self.expert.vocabulary.size} tokens, the anti-expert "
                f"{self.anti_expert.vocabulary.size}.",
                "train both from one backbone.",
            )
        self.alpha = alpha
        self.vocab_size = self.expert.vocab_size

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, alpha: float, device: str = "cpu", dtype: torch.dtype | str = "auto"
    ) -> "DExpertsGuide":
        """The experts in `folder`/expert and `folder`/anti, as `radq train-experts` writes them."""
        return cls(alpha=alpha, **load_experts(folder, device, dtype))

    def start(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None = None) -> State:
        return self.expert.read(input_ids, attention_mask), self.anti_expert.read(input_ids, attention_mask)

    def shift(self, state: State, candidates: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        wanted, unwanted = (part.logits_of(candidates) for part in state)
        return (self.alpha * (wanted - unwanted.to(wanted.device))).to(candidates.device)

    def advance(self, state: State, tokens: Int[Tensor, " b"]) -> State:
        return self._each(state, lambda expert, part: expert.advance(part, tokens.to(part.logits.device)))

    def select(self, state: State, rows: Int[Tensor, " r"]) -> State:
        return self._each(state, lambda _, part: part.select(rows))

    def join(self, states: Sequence[State]) -> State:
        wanted, unwanted = zip(*states, strict=True)
        return self.expert.join(wanted), self.anti_expert.join(unwanted)

    def rewind(self, state: State, n: int) -> State:
        return self._each(state, lambda expert, part: expert.rewind(part, n))

    @property
    def experts(self) -> list[nn.Module]:
        return [self.expert.lm, self.anti_expert.lm]

    @property
    def special_tokens(self) -> set[int]:
        return self.expert.special_tokens

    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        self.expert.check_vocabulary(base_size, tokenizer, base_name)

    def check_length(self, num_tokens: int) -> None:
        self.expert.check_length(num_tokens)
        self.anti_expert.check_length(num_tokens)

    def _each(self, state: State, step: Any) -> State:
        return step(self.expert, state[0]), step(self.anti_expert, state[1])


def holds_experts(folder: str | Path) -> bool:
    return all((Path(folder) / name).is_dir() for name in (EXPERT, ANTI_EXPERT))


def load_experts(folder: str | Path, device: str = "cpu", dtype: torch.dtype | str = "auto") -> dict[str, Any]:
    """What `DExpertsGuide` needs beside α."""
    if not holds_experts(folder):
        raise ModelError(
            f"{str(folder)!r} has no folders {EXPERT!r} and {ANTI_EXPERT!r}.",
            "make them with `radq train-experts --method dexperts`.",
        )
    parts = [Path(folder) / name for name in (EXPERT, ANTI_EXPERT)]
    expert, anti_expert = (load_causal_lm(part, dtype=dtype, device=device) for part in parts)
    return {"expert": expert, "anti_expert": anti_expert, "tokenizer": find_tokenizer(parts[0])}
