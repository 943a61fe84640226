"""Guided decoding inside transformers' `generate`: sampling, greedy, beam search, assisted decoding.

    processor = GuidedLogitsProcessor(guide, attention_mask=inputs.attention_mask)
    lm.generate(**inputs, logits_processor=[processor], do_sample=True, top_k=0)

transformers shows a processor nothing but `(input_ids, scores)`. This one remembers the state of the texts it saw last
and carries on from the longest beginning it knows of the texts it is shown. So beams, rollbacks, assisted decoding and
a second prompt need no care from the caller, and there is nothing to reset.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from radq.decoding.steering import Steering, Strengths, propose
from radq.errors import OptionError
from radq.guides import Guide

PADDING = -1  # stands for a padded place in the texts remembered


class GuidedLogitsProcessor(LogitsProcessor):
    """Restricts the scores to the base's candidates and adds the guide's shift.

    Args:
        guide: what to add.
        attention_mask: of the prompts, needed where they are padded (on the left). When the processor is used for
            further prompts, the token found under this padding counts as padding there too.
        top_k, top_p, temperature, kl_budget: see `radq.decoding.steering.Steering`. Turn `generate`'s own off
            (`top_k=0`, and `temperature` left at 1): it would apply them to the guided scores.
        tokenizer: of the base, to compare vocabularies token by token and not by size alone.
    """

    def __init__(
        self,
        guide: Guide,
        attention_mask: Int[Tensor, "b t"] | None = None,
        top_k: int | None = 20,
        top_p: float | None = None,
        temperature: float = 1.0,
        kl_budget: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        if temperature == 0:
            raise OptionError("temperature is 0.", "for greedy decoding call generate with do_sample=False.")
        self.guide = guide
        self.steering = Steering(top_k, top_p, temperature, kl_budget)
        self.tokenizer = tokenizer
        self.attention_mask = attention_mask
        self._prompts: Tensor | None = None  # (b, t): the ones that the attention mask belongs to
        self._texts: Tensor | None = None  # (b, t) tokens, PADDING where padded: what the state has read
        self._state: Any = None

    @torch.no_grad()
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Int[Tensor, "b t"], scores: Float[Tensor, "b v"]
    ) -> Float[Tensor, "b v"]:
        if self._texts is None:
            self.guide.check_vocabulary(scores.shape[1], self.tokenizer, "the base model")
        self._follow(self._with_padding(input_ids))
        strengths = Strengths.repeat(self.steering, self.guide, scores)
        proposal = propose(scores.float(), self.guide, self._state, strengths)
        self._state = proposal.state
        guided = torch.full_like(scores, -torch.inf)
        return guided.scatter(1, proposal.candidates, proposal.logits.to(scores.dtype))

    def _with_padding(self, input_ids: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
        """A copy of the texts with PADDING where their prompts were padded."""
        if self.attention_mask is None:
            return input_ids.clone()
        mask = self.attention_mask.to(input_ids.device).bool()
        if self._prompts is None:
            if len(input_ids) % len(mask) or input_ids.shape[1] < mask.shape[1]:
                raise OptionError(
                    f"the attention mask has shape {tuple(mask.shape)}, the prompts {tuple(input_ids.shape)}.",
                    "pass the attention_mask that goes to generate.",
                )
            self._prompts = input_ids[:, : mask.shape[1]].clone()
        mask = mask.repeat_interleave(len(self._prompts) // len(mask), dim=0)  # beams and samples stay by their prompt
        padding = torch.zeros_like(input_ids, dtype=torch.bool)
        if torch.equal(input_ids[:, : mask.shape[1]], self._prompts):
            padding[:, : mask.shape[1]] = ~mask
        elif not bool(mask.all()):  # other prompts: what was padding before is padding now
            pad_token = self._prompts[~mask][0]
            padding = (input_ids == pad_token).long().cumprod(1).bool()
        return input_ids.masked_fill(padding, PADDING)

    def _knows_padding(self, texts: Int[Tensor, "b t"]) -> bool:
        """Whether the attention mask is of these texts, or has shown by which token others are padded."""
        if self.attention_mask is None or self._prompts is None:
            return False
        return not bool(self.attention_mask.all()) or torch.equal(texts[:, : self._prompts.shape[1]], self._prompts)

    def _refuse_padding(self, texts: Int[Tensor, "b t"]) -> None:
        """A special token before some of the texts but not all, or twice before one, is padding, not a BOS."""
        known = set() if self.tokenizer is None else set(self.tokenizer.all_special_ids)
        special = torch.tensor(sorted(known | self.guide.special_tokens), device=texts.device, dtype=torch.long)
        first = texts[:, :1]
        begins = torch.isin(first, special)
        twice = begins & (texts[:, 1:2] == first)
        if bool(twice.any()) or bool(begins.any() & (first != first[0]).any()):
            raise OptionError(
                "texts begin with special tokens in the way of padding, and no attention_mask says whether they are.",
                "pass attention_mask=inputs.attention_mask to GuidedLogitsProcessor; ones where nothing is padded.",
            )

    def _follow(self, texts: Int[Tensor, "b t"]) -> None:
        """Bring the state to these texts, from the ones it has read if that is near, else from their beginning."""
        update = None if self._texts is None else _plan_update(self._texts, texts, self.guide.vocab_size)
        if update is None:
            if not self._knows_padding(texts):
                self._refuse_padding(texts)
            unique, rows = texts.unique(dim=0, return_inverse=True)  # beams and samples of a prompt begin as equals
            state = self.guide.start(unique.clamp(min=0), (unique != PADDING).long())
            self._state = state.select(rows)
        else:
            if update.rows is not None:
                self._state = self._state.select(update.rows)
            if update.rewind:
                self._state = self._state.rewind(update.rewind)
            if update.tokens is not None:
                self._state = self.guide.advance(self._state, update.tokens)
        self._texts = texts


class _Update(NamedTuple):
    """How a state of texts that were read becomes one of other texts: which rows to keep, how many tokens to drop,
    and which token to read.
    """

    rows: Int[Tensor, " b"] | None
    rewind: int
    tokens: Int[Tensor, " b"] | None


def _plan_update(known: Int[Tensor, "r s"], texts: Int[Tensor, "b t"], vocab_size: int) -> _Update | None:
    """Plan the update of a state; None if the texts must be read anew, which costs the same for two or more tokens."""
    s, t = known.shape[1], texts.shape[1]
    if t == s + 1 and torch.equal(texts[:, :s], known):  # the common case
        return _Update(None, 0, texts[:, s])
    for kept in (t, t - 1):
        rows = _find_rows(known[:, :kept], texts[:, :kept]) if 0 < kept <= s else None
        if rows is not None:
            readable = bool((texts[:, :kept] != PADDING).any(1).all())
            read = bool((known[rows, kept:] < vocab_size).all())  # what the guide has left out it cannot rewind
            return _Update(rows, s - kept, texts[:, kept] if kept < t else None) if readable and read else None
    return None


def _find_rows(known: Int[Tensor, "r n"], texts: Int[Tensor, "b n"]) -> Int[Tensor, " b"] | None:
    """Find a row of `known` that equals each text; None if some text has no such row."""
    _, groups = torch.cat([known, texts]).unique(dim=0, return_inverse=True)
    row_of = torch.full((int(groups.max()) + 1,), -1, device=texts.device)
    row_of[groups[: len(known)]] = torch.arange(len(known), device=texts.device)
    rows = row_of[groups[len(known) :]]
    return rows if bool((rows >= 0).all()) else None
