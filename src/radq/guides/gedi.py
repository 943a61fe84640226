"""GeDi (Krause et al. 2021): Bayes' rule over one language model that was trained with two control codes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq.errors import ModelError, OptionError
from radq.guides.base import Advice, Guide, Prompts
from radq.guides.dexperts import Expert, candidate_logits, class_log_posterior, log_normaliser
from radq.guides.folders import read_codes
from radq.models.loading import load_causal_lm
from radq.models.prefill import InTurns
from radq.models.reading import Reader, Reading
from radq.numerics import Candidates, PlacedCandidates, Positions, Strengths, Texts, Tokens
from radq.sources.model_source import ModelSource


@final
class GeDiGuide(Guide[Reading]):
    """shift(v) = ω log P(c | x, v), c the wanted one of two classes.

        P(c | x_1..x_T) = P(c) Π_j P(x_j | x_<j, c)^(s/T) / Σ_c' P(c') Π_j P(x_j | x_<j, c')^(s/T)

    with P(x_j | x_<j, c) from the language model after BOS and the control code of c; T counts the tokens of prompt
    and continuation, the candidate included. ω is signed: a negative one wants the second class, with weight |ω|.

    The filter: candidates go, those with the lowest P(c | x, v) first, as long as the ones gone hold less than
    `filter_p` of the guided probability; never those with P(c | x, v) ≥ `target_p`. So the best by P(c | x, v) stay,
    the fewest that hold more than 1 − filter_p (the paper's ρ). Guided probability is the softmax over the base's
    candidates of base logits and all shifts.

    Both classes are rows of one batch: a step is one forward of one token per class. The notes of the reading hold, for
    each row, log P of the tokens of its text, without BOS and control code, and the number of these tokens.
    """

    capturable = True

    def __init__(
        self,
        lm: PreTrainedModel,
        codes: tuple[Sequence[int], Sequence[int]],
        omega: float = 30.0,
        filter_p: float = 0.8,
        target_p: float = 0.8,
        prior: float = 0.5,
        scale: float = 1.0,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        """
        Args:
            lm: trained to write text of either class after its control code.
            codes: token ids of the control codes of the two classes; of the first for ω > 0.
            omega: how strongly to steer.
            filter_p: guided probability that the filter may take away; 0 turns it off.
            target_p: probability of the class above which a candidate is always kept.
            prior: P(c) of the first class.
            scale: s, which training finds.
            tokenizer: the language model's own, to compare vocabularies token by token and not by size alone.
        """
        if not math.isfinite(omega):
            raise OptionError(f"omega must be a finite number, got {omega}.", "give another omega.")
        for name, value in {"filter_p": filter_p, "target_p": target_p}.items():
            if not 0 <= value <= 1:
                raise OptionError(f"{name} must be a probability from 0 to 1, got {value}.", f"give another {name}.")
        if not 0 < prior < 1:
            raise OptionError(f"prior must be above 0 and below 1, got {prior}.", "give another prior.")
        if list(codes[0]) == list(codes[1]):
            raise OptionError(f"both control codes are {list(codes[0])}.", "give each class its own.")
        self.expert = Expert(lm, tokenizer, codes, keeps_scores=True)
        self._log_prior = (math.log(prior), math.log1p(-prior))
        self.beta, self.filter_p, self.target_p, self.scale = (omega,), filter_p, target_p, scale

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        omega: float = 30.0,
        device: str = "cpu",
        dtype: torch.dtype | str = "auto",
        **options: float,
    ) -> "GeDiGuide":
        """Load a folder that `radq train-experts --method gedi` has written; config.json holds codes and scale."""
        return load_gedi(folder, device, dtype)(omega=omega, **options)

    @property
    def readers(self) -> list[Reader]:
        return [self.expert.reader]

    def start_in_turns(self, prompts: Prompts) -> InTurns[Reading]:
        reading, scores, _ = yield from self.expert.read_scored(prompts)
        heads = [1 + len(code) for code in self.expert.codes] * len(prompts.input_ids)
        lengths = reading.prefix.attention_mask.sum(1) - scores.new_tensor(heads).long()  # (2b,)
        columns = torch.arange(scores.shape[1], 0, -1, device=scores.device)  # how far from the end
        sums = (scores * (columns <= lengths[:, None])).sum(1)
        return replace(reading, notes=torch.stack([sums, lengths.to(sums)], dim=1), copies=2)

    def log_posterior(self, state: Reading, candidates: Candidates) -> Float[Tensor, "2 b k"]:
        """log P(c | x, v) of both classes c. If the model does not know the token v, it is log P(c | x)."""
        assert state.notes is not None
        candidates = candidates.to(state.notes.device)
        added = _log_probabilities(state, candidates.repeat_interleave(2, dim=0))  # (2b, k)
        return self._posterior(added, state.notes[:, :1], state.notes[:, 1:], candidates)

    def place_rewards(
        self, input_ids: Texts, attention_mask: Texts, positions: Positions, candidates: PlacedCandidates
    ) -> Float[Tensor, "b p k 1"]:
        read = self.expert.read_places(input_ids, attention_mask, positions, candidates)
        added = read.logits - read.normaliser  # (2b, p, k)
        found = self._posterior(added, read.scores, read.lengths, candidates.to(added.device))
        return found[0, ..., None].to(candidates.device)

    def _posterior(
        self,
        added: Float[Tensor, "rows *p k"],
        scores: Float[Tensor, "rows *p 1"],
        lengths: Tensor,
        candidates: Int[Tensor, "b *p k"],
    ) -> Float[Tensor, "2 b *p k"]:
        """log P(c | x, v) from log P(v | x, c) and, of the text before, log P(x | c) and the length; 2b rows."""
        sums = (added + scores).unflatten(0, (-1, 2)).transpose(0, 1)
        lengths = lengths[::2] + (candidates < self.vocab_size)
        return class_log_posterior(sums, lengths.clamp(min=1), self.scale, self._log_prior)

    def advise(self, state: Reading, candidates: Candidates, beta: Strengths | None = None) -> Advice:
        first, second = self.log_posterior(state, candidates).to(candidates.device)
        omega = self.beta_rows(beta, first)  # (b, 1)
        wanted = torch.where(omega < 0, second, first)

        def allowed(logits: Float[Tensor, "b k"]) -> Bool[Tensor, "b k"]:
            kept = filter_candidates(wanted.to(logits.device), logits, self.filter_p, self.target_p)
            return kept | (omega == 0).to(logits.device)

        shift = omega.abs() * wanted
        return Advice(shift, state, rewards=(first[..., None],), allowed=allowed if self.filter_p else None)

    def advance(self, state: Reading, tokens: Tokens) -> Reading:
        assert state.notes is not None
        both = tokens.to(state.notes.device).repeat_interleave(2)[:, None]
        scores = _log_probabilities(state, both)
        notes = state.notes + torch.cat([scores, (both < self.vocab_size).to(scores)], dim=1)
        return state.advance(both.squeeze(1)).note(notes)


def _log_probabilities(reading: Reading, tokens: Int[Tensor, "rows k"]) -> Float[Tensor, "rows k"]:
    """The log-probabilities of next tokens; 0 for unknown ones."""
    return candidate_logits(reading, tokens) - log_normaliser(reading.last)


def filter_candidates(
    log_posterior: Float[Tensor, "b k"], logits: Float[Tensor, "b k"], filter_p: float, target_p: float
) -> Bool[Tensor, "b k"]:
    """GeDi's filter, see `GeDiGuide`. The best candidate by posterior that can be chosen at all is always kept."""
    posterior, order = log_posterior.double().sort(dim=-1, descending=True, stable=True)
    probabilities = logits.double().softmax(-1).gather(1, order)
    better = probabilities.cumsum(-1) - probabilities  # what those with a higher posterior hold
    kept = (better <= 1 - filter_p) | (posterior >= (math.log(target_p) if target_p else -math.inf))
    return torch.zeros_like(kept).scatter(1, order, kept)


def load_gedi(folder: str | Path, device: str = "cpu", dtype: torch.dtype | str = "auto") -> Callable[..., GeDiGuide]:
    """Load the model of `GeDiGuide`; return a function that makes guides from ω, prior and filter."""
    source = ModelSource.find(folder)
    stored = read_codes(source)
    if stored is None:
        raise ModelError(f"{str(folder)!r} names no control codes.", "make it with `radq train-experts --method gedi`.")
    lm = load_causal_lm(source, dtype=dtype, device=device)
    high, low = stored["codes"]
    return partial(GeDiGuide, lm, (high, low), scale=stored["scale"], tokenizer=source.find_tokenizer())
