"""Language models as experts: they read along with a text and say what they think of the next token.

Each run begins with a BOS and maybe a control code; a BOS that the text brings along is not read twice.
Axes: b batch, t time, n columns of a run, v vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from radq.errors import ContextLengthError
from radq.models import kv_cache
from radq.models.kv_cache import Prefix
from radq.models.loading import Wrappable, max_positions, name_positions, num_logits
from radq.models.vocabulary import Vocabulary, check_vocabulary, find_bos, find_special_tokens, read_vocabulary
from radq.numerics import at_least_float32, log_probabilities

NO_CODE: Sequence[Sequence[int]] = ((),)


@dataclass(frozen=True)
class ExpertState:
    """What a language model knows after a batch of texts: a value."""

    prefix: Prefix
    logits: Float[Tensor, "b v"]  # of the next token, in the precision of the model
    num_known: int  # tokens with smaller ids are known; a base model may have more

    def select(self, rows: Int[Tensor, " r"]) -> "ExpertState":
        rows = rows.to(self.logits.device)
        return replace(self, prefix=self.prefix.select(rows), logits=self.logits[rows])

    @staticmethod
    def join(states: "Sequence[ExpertState]") -> "ExpertState":
        prefix = kv_cache.join([state.prefix for state in states])
        return replace(states[0], prefix=prefix, logits=torch.cat([state.logits for state in states]))

    def logits_of(self, tokens: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        """The logits of tokens, in float32 or better.

        An unknown token gets the logit that makes its log-probability 0: it does not change how likely the text is.
        """
        tokens = tokens.to(self.logits.device)
        known = tokens < self.num_known
        logits = at_least_float32(self.logits.gather(1, tokens * known))
        return logits if bool(known.all()) else torch.where(known, logits, self.log_normaliser)

    def log_probabilities(self, tokens: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        """The log-probabilities of next tokens; 0 for unknown ones."""
        return self.logits_of(tokens) - self.log_normaliser

    @cached_property
    def log_normaliser(self) -> Float[Tensor, "b 1"]:
        """The one number that takes the whole vocabulary: computed once, if anybody asks."""
        return at_least_float32(self.logits).logsumexp(1, keepdim=True)


class Expert:
    """A causal language model that reads along. With c codes it reads every text c times, as rows of one batch."""

    def __init__(self, lm: Wrappable, tokenizer: PreTrainedTokenizerBase | None = None):
        self.lm, self.tokenizer = lm.eval(), tokenizer
        kv_cache.takes_padding(lm)  # tried here, so that the trial is no part of a first step
        self.bos = find_bos(lm.config, tokenizer)
        self.vocabulary: Vocabulary = read_vocabulary(num_logits(lm), tokenizer)
        self.max_positions = max_positions(lm.config)
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if kv_cache.accepts(lm, "logits_to_keep") else {}

    @torch.no_grad()
    def read(
        self,
        input_ids: Int[Tensor, "b t"],
        attention_mask: Int[Tensor, "b t"] | None,
        codes: Sequence[Sequence[int]] = NO_CODE,
    ) -> ExpertState:
        """The state after a batch of texts: the rows of the first code, then those of the next."""
        tokens, mask = self._begin(input_ids, attention_mask, codes)
        output, prefix = kv_cache.start(self.lm, tokens, mask, **self._last_only)
        return ExpertState(prefix, output.logits[:, -1], self.vocab_size)

    @torch.no_grad()
    def read_scored(
        self,
        input_ids: Int[Tensor, "b t"],
        attention_mask: Int[Tensor, "b t"] | None,
        codes: Sequence[Sequence[int]] = NO_CODE,
    ) -> tuple[ExpertState, Float[Tensor, "rows n"]]:
        """And the log-probability of every token of the run, given those before it; 0 in the first column."""
        tokens, mask = self._begin(input_ids, attention_mask, codes)
        output, prefix = kv_cache.start(self.lm, tokens, mask)
        logits = at_least_float32(output.logits)  # (rows, n, v)
        scores = torch.zeros_like(logits[..., 0])
        scores[:, 1:] = log_probabilities(logits[:, :-1], tokens[:, 1:])
        last = output.logits[:, -1].clone()  # a view would keep those of all positions
        return ExpertState(prefix, last, self.vocab_size), scores

    @torch.no_grad()
    def advance(self, state: ExpertState, tokens: Int[Tensor, " b"]) -> ExpertState:
        """The state after one more token per row; rows whose token the model does not know stay as they are."""
        held = tokens >= self.vocab_size
        if bool(held.all()):
            return state
        self._check_positions(state.prefix.tokens.shape[1] + 1)
        known = tokens.masked_fill(held, 0)
        output, prefix = kv_cache.extend(self.lm, state.prefix, known[:, None], **self._last_only)
        longer = replace(state, prefix=prefix, logits=output.logits[:, -1])
        if not bool(held.any()):
            return longer
        logits = torch.where(held[:, None], state.logits, longer.logits)
        return replace(state, prefix=kv_cache.hold_rows(held, state.prefix, prefix), logits=logits)

    def rewind(self, state: ExpertState, n: int) -> ExpertState:
        """The state before the last n tokens of every row."""
        return self.advance(replace(state, prefix=state.prefix.crop(n + 1)), state.prefix.tokens[:, -n - 1])

    def join(self, states: Sequence[ExpertState]) -> ExpertState:
        kv_cache.check_padding(self.lm)
        return ExpertState.join(states)

    @property
    def vocab_size(self) -> int:
        """Tokens with smaller ids are known."""
        return self.vocabulary.num_tokens or self.vocabulary.size

    @property
    def special_tokens(self) -> set[int]:
        return find_special_tokens(self.lm.config, self.tokenizer)

    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        check_vocabulary(self.vocabulary, base_size, tokenizer, base_name, "expert")

    def check_length(self, num_tokens: int, codes: Sequence[Sequence[int]] = NO_CODE) -> None:
        room = None if self.max_positions is None else self.max_positions - 1 - max(map(len, codes))
        if room is not None and num_tokens > room:
            raise ContextLengthError(
                f"prompt and new tokens are {num_tokens} tokens, but the expert has room for {room}.",
                "shorten the prompt or lower max_new_tokens.",
            )

    def _begin(
        self,
        input_ids: Int[Tensor, "b t"],
        attention_mask: Int[Tensor, "b t"] | None,
        codes: Sequence[Sequence[int]],
    ) -> tuple[Int[Tensor, "rows n"], Int[Tensor, "rows n"]]:
        """BOS, code and text of every run, left padded as little as the longest allows."""
        device = self.lm.device
        input_ids, mask = kv_cache.leave_out_unknown(
            input_ids.to(device), None if attention_mask is None else attention_mask.to(device), self.vocab_size
        )
        mask = mask * ~kv_cache.leading(input_ids, mask, self.bos)
        b = len(input_ids)

        def run(code: Sequence[int]) -> tuple[Tensor, Tensor]:
            head = input_ids.new_tensor([self.bos, *code]).expand(b, -1)
            gap = input_ids.new_zeros(b, longest - len(code))
            tokens, heads = torch.cat([gap, head, input_ids], dim=1), torch.ones_like(head)
            return tokens, torch.cat([gap, heads, mask], dim=1)

        longest = max(map(len, codes))
        runs, masks = zip(*map(run, codes), strict=True)
        tokens, mask = kv_cache.pack_right(torch.cat(runs), torch.cat(masks))
        used = int(mask.sum(1).max())
        self._check_positions(used)
        return tokens[:, -used:], mask[:, -used:]

    def _check_positions(self, n: int) -> None:
        if self.max_positions is not None and n > self.max_positions:
            raise ContextLengthError(
                f"{n} tokens (BOS and control code included) do not fit the expert's {name_positions(self.lm.config)}.",
                "shorten the text.",
            )


def class_log_posterior(
    sums: Float[Tensor, "2 ..."], lengths: Tensor, scale: float | Tensor, log_prior: Sequence[float]
) -> Float[Tensor, "2 ..."]:
    """log P(c | x) of two classes from the sums of log P(x_j | x_<j, c) over the tokens of texts x of these lengths.

    P(c | x_1..x_T) ∝ P(c) · Π_j P(x_j | x_<j, c)^(scale / T)
    """
    prior = sums.new_tensor(list(log_prior)).view(2, *[1] * (sums.dim() - 1))
    return (scale * sums / lengths + prior).log_softmax(0)
