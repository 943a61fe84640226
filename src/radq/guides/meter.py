"""What a guide costs, measured: calls of its experts and the tokens they read.

    with Meter(guide) as meter:
        generate(lm, tokenizer, prompts, meter)
    meter.calls_per_step, meter.tokens_per_token

A call is one forward of one transformer over a batch. Tokens are those it reads, over all rows, padding excluded:
RAD-V's candidates count, and so do both classes of GeDi. Reading the prompts is counted apart. The last token of a text
is never read, so in a short text the numbers per token are a little lower than those of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedTokenizerBase

from radq.guides import Guide


@dataclass
class Reading:
    """What experts have read."""

    calls: int = 0
    tokens: int | Tensor = 0  # summed where the masks are, so that counting never waits for a GPU

    def count(self, input_ids: Int[Tensor, "b n"], mask: Any) -> None:
        self.calls += 1
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self.tokens = mask[:, mask.shape[1] - input_ids.shape[1] :].sum() + self.tokens
        else:  # no mask, or one for siblings: nothing is padded
            self.tokens = input_ids.numel() + self.tokens


class Meter(Guide):
    """A guide that does what another does, and counts while its `with` block lasts."""

    def __init__(self, guide: Guide):
        self.guide, self.vocab_size = guide, guide.vocab_size
        self.steps = 0  # times that candidates were scored, for a batch of texts
        self.tokens = 0  # and for how many texts in all: the tokens that were generated
        self.prompts, self.continuations = Reading(), Reading()
        self._reading = self.continuations
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "Meter":
        experts = {id(expert): expert for expert in self.guide.experts}  # one that serves two guides is one
        self._hooks = [expert.register_forward_pre_hook(self._count, with_kwargs=True) for expert in experts.values()]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def calls_per_step(self) -> float:
        """Forwards per generated token of a batch, prompts aside."""
        return self.continuations.calls / max(1, self.steps)

    @property
    def tokens_per_token(self) -> float:
        """Tokens read per token generated, prompts aside."""
        return int(self.continuations.tokens) / max(1, self.tokens)

    def _count(self, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._reading.count(kwargs["input_ids"], kwargs.get("attention_mask"))

    # --- the guide itself ---

    def start(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None = None) -> Any:
        self._reading = self.prompts
        try:
            return self.guide.start(input_ids, attention_mask)
        finally:
            self._reading = self.continuations

    def shift(self, state: Any, candidates: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        self.steps += 1
        self.tokens += len(candidates)
        return self.guide.shift(state, candidates)

    def advance(self, state: Any, tokens: Int[Tensor, " b"]) -> Any:
        return self.guide.advance(state, tokens)

    def select(self, state: Any, rows: Int[Tensor, " r"]) -> Any:
        return self.guide.select(state, rows)

    def join(self, states: Sequence[Any]) -> Any:
        return self.guide.join(states)

    def rewind(self, state: Any, n: int) -> Any:
        return self.guide.rewind(state, n)

    def clipped(self, state: Any) -> Bool[Tensor, "b k"] | None:
        return self.guide.clipped(state)

    def allowed(
        self, state: Any, candidates: Int[Tensor, "b k"], logits: Float[Tensor, "b k"]
    ) -> Bool[Tensor, "b k"] | None:
        return self.guide.allowed(state, candidates, logits)

    @property
    def experts(self) -> list[nn.Module]:
        return self.guide.experts

    @property
    def special_tokens(self) -> set[int]:
        return self.guide.special_tokens

    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        self.guide.check_vocabulary(base_size, tokenizer, base_name)

    def check_length(self, num_tokens: int) -> None:
        self.guide.check_length(num_tokens)
