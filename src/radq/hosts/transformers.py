"""Guided decoding inside transformers' `generate`: sampling, greedy and beam search, and assisted decoding.

    processor = GuidedLogitsProcessor(guide, attention_mask=inputs.attention_mask)
    lm.generate(**inputs, logits_processor=[processor], do_sample=True, top_k=0)

transformers passes nothing but `(input_ids, scores)` to a processor. This one keeps the guide's state of the texts of
the last call. If the texts of the next call differ from them by the order of rows, by some tokens fewer or by one token
more, it updates the state; otherwise it reads the texts from their beginning. So it works for beams, assisted decoding
and prompt after prompt, and never has to be reset.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from radq.decoding.config import DEFAULT_KL_BUDGET, Ends, Steering
from radq.decoding.steering import RowSettings, propose
from radq.decoding.text import find_stops
from radq.errors import OptionError
from radq.guides.base import BaseStates, Guide, Prompts
from radq.models.loading import Wrappable, find_backbone, num_logits
from radq.models.prefill import finish
from radq.models.readout import join_layers

PADDING = -1  # marks padding in the texts that are kept


class GuidedLogitsProcessor(LogitsProcessor):
    """Restricts the scores to candidates of the base model and adds the guide's shift.

    Args:
        guide: the guide that steers.
        attention_mask: the attention mask of the prompts, needed if they are padded (on the left). If the processor is
            then used for other prompts, the padding token of these prompts counts as padding there too.
        top_k, top_p, temperature, kl_budget: see `radq.decoding.steering.Steering`. Call `generate` with `top_k=0` and
            without a temperature: it would apply its own values to the guided scores.
        tokenizer: the tokenizer of the base model, to compare vocabularies token by token and not by size alone.
        lm: the base model. Guides that read its hidden states then take them from its own forwards, instead of running
            it a second time; this does not work with assisted decoding.
        ends: see `Steering`.
        stop_token_ids: the tokens that end a text, as `generate` knows them; by default those of `lm` or `tokenizer`,
            and without these the ends of the guide's own models.
    """

    def __init__(
        self,
        guide: Guide,
        attention_mask: Int[Tensor, "b t"] | None = None,
        top_k: int | None = 20,
        top_p: float | None = None,
        temperature: float = 1.0,
        kl_budget: float | None = DEFAULT_KL_BUDGET,
        tokenizer: PreTrainedTokenizerBase | None = None,
        lm: Wrappable | None = None,
        ends: Ends = "base",
        stop_token_ids: Sequence[int] | None = None,
    ):
        if temperature == 0:
            raise OptionError(
                "temperature must be above 0, got 0.", "for greedy decoding, call generate with do_sample=False."
            )
        self.guide = guide
        self.steering = Steering(top_k, top_p, temperature, kl_budget, ends)
        known = find_stops(lm, tokenizer, stop_token_ids)
        if lm is None and tokenizer is None and stop_token_ids is None:
            known = [end for one in guide.readers for end in find_stops(one.model, one.tokenizer, None)]
        self._stops = set(known)
        self.tokenizer = tokenizer
        self.attention_mask = attention_mask
        self._prompts: Tensor | None = None  # (b, t): the prompts that the attention mask belongs to
        self._texts: Tensor | None = None  # (b, t): the texts that the state has read, with PADDING
        self._state: Any = None
        self._watch: _BaseWatch | None = None
        layers = join_layers([reader.base_layers for reader in guide.readers])
        if lm is not None:
            guide.check_base(lm)
            self._watch = _BaseWatch(lm, layers) if layers else None

    @torch.no_grad()
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Int[Tensor, "b t"], scores: Float[Tensor, "b v"]
    ) -> Float[Tensor, "b v"]:
        if self._texts is None:
            self.guide.check_vocabulary(scores.shape[1], self.tokenizer, "the base model")
        if self._watch is not None:
            self._watch.check(input_ids)
        self._follow(*self._mark_padding(input_ids))
        strengths = RowSettings.repeat(self.steering, self.guide, scores, self._stops)
        proposal = propose(scores.float(), self.guide, self._state, strengths).require_finite()
        self._state = proposal.state
        guided = torch.full_like(scores, -torch.inf)
        return guided.scatter(1, proposal.candidates, proposal.logits.to(scores.dtype))

    def _mark_padding(self, input_ids: Int[Tensor, "b t"]) -> tuple[Int[Tensor, "b t"], bool]:
        """Copy the texts, with PADDING in place of the padding of their prompts; return also whether it is known.

        The attention mask belongs to some texts, or has shown which token pads others.
        """
        if self.attention_mask is None:
            return input_ids.clone(), False
        mask = self.attention_mask.to(input_ids.device).bool()
        if self._prompts is None:
            if len(input_ids) % len(mask) or input_ids.shape[1] < mask.shape[1]:
                shapes = f"{tuple(mask.shape)} for prompts of shape {tuple(input_ids.shape)}"
                raise OptionError(
                    f"the attention mask must belong to the prompts, got one of shape {shapes}.",
                    "pass the attention_mask that goes to generate.",
                )
            self._prompts = input_ids[:, : mask.shape[1]].clone()
        mask = mask.repeat_interleave(len(self._prompts) // len(mask), dim=0)  # samples of a prompt are neighbours
        padding = torch.zeros_like(input_ids, dtype=torch.bool)
        if torch.equal(input_ids[:, : mask.shape[1]], self._prompts):
            padding[:, : mask.shape[1]] = ~mask
        elif not bool(mask.all()):  # other prompts: they are padded with the same token
            pad_token = self._prompts[~mask][0]
            padding = (input_ids == pad_token).long().cumprod(1).bool()
        else:
            return input_ids.clone(), False
        return input_ids.masked_fill(padding, PADDING), True

    def _refuse_padding(self, texts: Int[Tensor, "b t"]) -> None:
        """Raise if a special token begins some texts but not all, or one of them twice: they seem to be padded."""
        own = set() if self.tokenizer is None else set(self.tokenizer.all_special_ids)
        special = torch.tensor(sorted(own | self.guide.special_tokens), device=texts.device, dtype=torch.long)
        first = texts[:, :1]
        begins = torch.isin(first, special)
        twice = begins & (texts[:, 1:2] == first)
        if bool(twice.any()) or bool(begins.any() & (first != first[0]).any()):
            raise OptionError(
                "some texts begin with special tokens as if they were padded, and there is no attention_mask for them.",
                "pass attention_mask=inputs.attention_mask to GuidedLogitsProcessor; ones if nothing is padded.",
            )

    def _follow(self, texts: Int[Tensor, "b t"], knows_padding: bool) -> None:
        """Bring the state up to date with these texts: update it if that is cheap, else read them anew."""
        update = None if self._texts is None else _plan_update(self._texts, texts, self.guide.vocab_size)
        if update is None:
            if not knows_padding:
                self._refuse_padding(texts)
            unique, rows = texts.unique(dim=0, return_inverse=True)  # beams and samples of a prompt are equal at first
            states = None if self._watch is None else self._watch.states
            prompts = Prompts(unique.clamp(min=0), (unique != PADDING).long(), base=states)
            self._state = finish(self.guide.start_in_turns(prompts)).select(rows)
        else:
            if update.rows is not None:
                self._state = self._state.select(update.rows)
            if update.rewind:
                self._state = self._state.rewind(update.rewind)
            if update.tokens is not None:
                self._state = self.guide.advance(self._state, update.tokens)
        self._texts = texts


class _BaseWatch:
    """Hooks that keep the hidden states of the last forward of a base model, while the watch exists."""

    def __init__(self, lm: Wrappable, layers: tuple[int, ...]):
        self._num_tokens = num_logits(lm)
        self._tokens: Tensor | None = None  # (b, n): that the last forward has read
        self._states: dict[int, Tensor] = {}  # of each layer, (b, d), at the last of them
        backbone, seen = find_backbone(lm, type(lm).__name__), weakref.ref(self)

        def ask(_: Any, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return arguments, {**options, "output_hidden_states": True}

        def keep(_: Any, __: Any, options: dict[str, Any], output: Any) -> None:
            watch = seen()
            if watch is not None:
                watch._tokens = options.get("input_ids")
                watch._states = {layer: output.hidden_states[layer][:, -1] for layer in layers}

        before = backbone.register_forward_pre_hook(ask, with_kwargs=True)
        after = backbone.register_forward_hook(keep, with_kwargs=True)
        for handle in (before, after):
            weakref.finalize(self, handle.remove)

    def check(self, input_ids: Int[Tensor, "b t"]) -> None:
        """Refuse texts that do not end with the tokens that the base model has just read."""
        tokens = self._tokens
        if tokens is None or not torch.equal(input_ids[:, -tokens.shape[1] :], tokens.to(input_ids.device)):
            raise OptionError(
                "the base model has not just read the ends of these texts, so its hidden states are not theirs.",
                "leave lm out of GuidedLogitsProcessor, as for assisted decoding.",
            )

    @property
    def states(self) -> BaseStates:
        return BaseStates(lambda layers: torch.cat([self._states[one] for one in layers], dim=1), self._num_tokens)


class _Update(NamedTuple):
    """The changes from a state of some texts to that of others: rows to select, tokens to drop, tokens to read."""

    rows: Int[Tensor, " b"] | None  # the row of the state for each text; None if nothing moves
    rewind: int  # the number of tokens to drop at the end of every row
    tokens: Int[Tensor, " b"] | None  # the token to read then; None if there is none


def _plan_update(known: Int[Tensor, "r s"], texts: Int[Tensor, "b t"], vocab_size: int) -> _Update | None:
    """Plan the update of a state; None if the texts must be read from their beginning.

    Texts with two or more new tokens are read from their beginning as well, which takes no longer.
    """
    s, t = known.shape[1], texts.shape[1]
    if t == s + 1 and torch.equal(texts[:, :s], known):  # one more token per row: the common case
        return _Update(None, 0, texts[:, s])
    for kept in (t, t - 1):
        rows = _find_rows(known[:, :kept], texts[:, :kept]) if 0 < kept <= s else None
        if rows is not None:
            readable = bool((texts[:, :kept] != PADDING).any(1).all())
            read = bool((known[rows, kept:] < vocab_size).all())  # a guide cannot rewind tokens that it does not know
            return _Update(rows, s - kept, texts[:, kept] if kept < t else None) if readable and read else None
    return None


def _find_rows(known: Int[Tensor, "r n"], texts: Int[Tensor, "b n"]) -> Int[Tensor, " b"] | None:
    """Find a row of `known` that equals each text; None if some text has no such row."""
    _, groups = torch.cat([known, texts]).unique(dim=0, return_inverse=True)
    row_of = torch.full((int(groups.max()) + 1,), -1, device=texts.device)
    row_of[groups[: len(known)]] = torch.arange(len(known), device=texts.device)
    rows = row_of[groups[len(known) :]]
    return rows if bool((rows >= 0).all()) else None
