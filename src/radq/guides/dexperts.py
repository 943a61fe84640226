"""DExperts (Liu et al. 2021): two language models, one finetuned on text of an attribute and one on text without."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq.errors import ModelError, OptionError, VocabularyError
from radq.guides.base import Advice, Guide, Prompts, States
from radq.guides.expert import Expert, candidate_logits
from radq.guides.folders import ANTI_EXPERT, EXPERT, holds_experts
from radq.models.loading import load_causal_lm
from radq.models.prefill import InTurns
from radq.models.reading import Reader, Reading
from radq.sources.model_source import ModelSource


@final
class DExpertsGuide(Guide[States[Reading]]):
    """shift(v) = α (z⁺(v | x) − z⁻(v | x)), z⁺ and z⁻ the logits of expert and anti-expert.

    α is signed: a negative one steers away from what the expert was trained on. A step is one forward of one token for
    each of the two. A token that the experts do not know counts as equally likely for both.
    """

    capturable = True

    def __init__(
        self,
        expert: PreTrainedModel,
        anti_expert: PreTrainedModel,
        alpha: float,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        """`tokenizer` is the experts' own: to compare vocabularies token by token and not by size alone."""
        if not math.isfinite(alpha):
            raise OptionError(f"alpha must be a finite number, got {alpha}.", "give another alpha.")
        self.expert, self.anti_expert = Expert(expert, tokenizer), Expert(anti_expert, tokenizer)
        sizes = [reader.vocabulary.size for reader in self.readers]
        if self.readers[0].vocabulary != self.readers[1].vocabulary:
            raise VocabularyError(
                f"the expert has {sizes[0]} tokens, the anti-expert {sizes[1]}.", "train both from one backbone."
            )
        self.beta = (alpha,)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, alpha: float, device: str = "cpu", dtype: torch.dtype | str = "auto"
    ) -> "DExpertsGuide":
        """Load the experts in `folder`/expert and `folder`/anti, as `radq train-experts` writes them."""
        return load_experts(folder, device, dtype)(alpha=alpha)

    @property
    def readers(self) -> list[Reader]:
        return [self.expert.reader, self.anti_expert.reader]

    def start_in_turns(self, prompts: Prompts) -> InTurns[States[Reading]]:
        wanted = yield from self.expert.read(prompts)
        unwanted = yield from self.anti_expert.read(prompts)
        return States((wanted, unwanted))

    def advise(
        self, state: States[Reading], candidates: Int[Tensor, "b k"], beta: Float[Tensor, "b s"] | None = None
    ) -> Advice:
        wanted, unwanted = (candidate_logits(part, candidates).to(candidates.device) for part in state.parts)
        difference = wanted - unwanted
        return Advice(self.beta_rows(beta, wanted) * difference, state, rewards=(difference[..., None],))

    def place_rewards(
        self,
        input_ids: Int[Tensor, "b t"],
        attention_mask: Int[Tensor, "b t"],
        positions: Int[Tensor, "b p"],
        candidates: Int[Tensor, "b p k"],
    ) -> Float[Tensor, "b p k 1"]:
        wanted, unwanted = (
            expert.read_places(input_ids, attention_mask, positions, candidates).logits.to(candidates.device)
            for expert in (self.expert, self.anti_expert)
        )
        return (wanted - unwanted)[..., None]

    def advance(self, state: States[Reading], tokens: Int[Tensor, " b"]) -> States[Reading]:
        return States(tuple(part.advance(tokens) for part in state.parts))


def load_experts(
    folder: str | Path, device: str = "cpu", dtype: torch.dtype | str = "auto"
) -> Callable[..., DExpertsGuide]:
    """Load the models of `DExpertsGuide`; return a function that makes guides from α."""
    if not holds_experts(folder):
        raise ModelError(
            f"{str(folder)!r} has no folders {EXPERT!r} and {ANTI_EXPERT!r}.",
            "make them with `radq train-experts --method dexperts`.",
        )
    parts = [ModelSource.find(Path(folder) / name) for name in (EXPERT, ANTI_EXPERT)]
    expert, anti_expert = (load_causal_lm(part, dtype=dtype, device=device) for part in parts)
    return partial(DExpertsGuide, expert, anti_expert, tokenizer=parts[0].find_tokenizer())
