"""GeDi (Krause et al. 2021): Bayes' rule over one language model that was trained with two control codes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from radq.errors import ModelError, OptionError
from radq.guides.base import Guide
from radq.guides.expert import Expert, ExpertState, class_log_posterior
from radq.models.loading import explained, find_tokenizer, load_causal_lm


@dataclass(frozen=True)
class GeDiState:
    """Two runs over each text as one batch: the b rows of the wanted class, then those of the other."""

    run: ExpertState
    scores: Float[Tensor, "rows t"]  # log P of each token of the text; 0 at padding, BOS and control code
    lengths: Int[Tensor, " b"]  # tokens of each text

    def select(self, rows: Int[Tensor, " r"]) -> "GeDiState":
        rows = rows.to(self.lengths.device)
        both = torch.cat([rows, rows + len(self.lengths)])
        return GeDiState(self.run.select(both), self.scores[both], self.lengths[rows])

    @staticmethod
    def join(states: "Sequence[GeDiState]", expert: Expert) -> "GeDiState":
        classes = [
            (state, c * len(state.lengths) + torch.arange(len(state.lengths))) for c in (0, 1) for state in states
        ]
        run = expert.join([state.run.select(rows) for state, rows in classes])
        n = run.prefix.tokens.shape[1]
        scores = [F.pad(state.scores[rows], (n - state.scores.shape[1], 0)) for state, rows in classes]
        return GeDiState(run, torch.cat(scores), torch.cat([state.lengths for state in states]))


@final
class GeDiGuide(Guide):
    """shift(v) = ω log P(c | x, v), c the wanted one of two classes.

        P(c | x_1..x_T) = P(c) Π_j P(x_j | x_<j, c)^(s/T) / Σ_c' P(c') Π_j P(x_j | x_<j, c')^(s/T)

    with P(x_j | x_<j, c) from the language model after BOS and the control code of c; T counts the tokens of prompt
    and continuation, the candidate included. ω is signed: a negative one wants the second class, with weight |ω|.

    The filter: candidates go, those with the lowest P(c | x, v) first, as long as the ones gone hold less than
    `filter_p` of the guided probability; never those with P(c | x, v) ≥ `target_p`. So the best by P(c | x, v) stay,
    the fewest that hold more than 1 − filter_p (the paper's ρ). Guided probability is the softmax over the base's
    candidates of base logits and all shifts.

    Both classes are rows of one batch: a step is one forward of one token per class.
    """

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
            raise OptionError(f"omega is {omega}.", "give a finite number.")
        for name, value in {"filter_p": filter_p, "target_p": target_p}.items():
            if not 0 <= value <= 1:
                raise OptionError(f"{name} is {value}.", "give a probability from 0 to 1.")
        if not 0 < prior < 1:
            raise OptionError(f"prior is {prior}.", "give a probability between 0 and 1.")
        if list(codes[0]) == list(codes[1]):
            raise OptionError(f"both control codes are {list(codes[0])}.", "give each class its own.")
        self.expert = Expert(lm, tokenizer)
        wanted, other = (1, 0) if omega < 0 else (0, 1)
        priors = (math.log(prior), math.log1p(-prior))
        self._codes, self._log_prior = (codes[wanted], codes[other]), (priors[wanted], priors[other])
        self.omega, self.filter_p, self.target_p, self.scale = omega, filter_p, target_p, scale
        self.vocab_size = self.expert.vocab_size

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        omega: float = 30.0,
        device: str = "cpu",
        dtype: torch.dtype | str = "auto",
        **options: Any,
    ) -> "GeDiGuide":
        """A folder that `radq train-experts --method gedi` has written; its config.json holds codes and scale."""
        return cls(omega=omega, **load_gedi(folder, device, dtype), **options)

    def start(self, input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None = None) -> GeDiState:
        run, scores = self.expert.read_scored(input_ids, attention_mask, self._codes)
        heads = [1 + len(code) for code in self._codes for _ in range(len(input_ids))]
        lengths = run.prefix.mask.sum(1) - scores.new_tensor(heads).long()  # (2b,)
        columns = torch.arange(scores.shape[1], 0, -1, device=scores.device)  # how far from the end
        return GeDiState(run, scores * (columns <= lengths[:, None]), lengths[: len(input_ids)])

    def log_posterior(self, state: GeDiState, candidates: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        """log P(c | x, v); of a token v that the model does not know log P(c | x)."""
        candidates = candidates.to(state.scores.device)
        both = state.run.log_probabilities(candidates.repeat(2, 1)) + state.scores.sum(1, keepdim=True)  # (2b, k)
        sums = both.view(2, *candidates.shape)
        lengths = state.lengths[:, None] + (candidates < self.vocab_size).long()  # (b, k)
        return class_log_posterior(sums, lengths.clamp(min=1), self.scale, self._log_prior)[0]

    def shift(self, state: GeDiState, candidates: Int[Tensor, "b k"]) -> Float[Tensor, "b k"]:
        return (abs(self.omega) * self.log_posterior(state, candidates)).to(candidates.device)

    def allowed(
        self, state: GeDiState, candidates: Int[Tensor, "b k"], logits: Float[Tensor, "b k"]
    ) -> Bool[Tensor, "b k"] | None:
        if self.omega == 0 or self.filter_p == 0:
            return None
        return filter_candidates(
            self.log_posterior(state, candidates).to(logits.device), logits, self.filter_p, self.target_p
        )

    def advance(self, state: GeDiState, tokens: Int[Tensor, " b"]) -> GeDiState:
        both = tokens.to(state.scores.device).repeat(2)
        held = both >= self.vocab_size
        if bool(held.all()):
            return state
        longer = torch.cat([state.scores, state.run.log_probabilities(both[:, None])], dim=1)
        scores = torch.where(held[:, None], F.pad(state.scores, (1, 0)), longer)  # as the prefix's columns move
        lengths = state.lengths + (~held[: len(tokens)]).long()
        return GeDiState(self.expert.advance(state.run, both), scores, lengths)

    def select(self, state: GeDiState, rows: Int[Tensor, " r"]) -> GeDiState:
        return state.select(rows)

    def join(self, states: Sequence[GeDiState]) -> GeDiState:
        return GeDiState.join(states, self.expert)

    def rewind(self, state: GeDiState, n: int) -> GeDiState:
        kept = state.scores.shape[1] - n
        return GeDiState(self.expert.rewind(state.run, n), state.scores[:, :kept], state.lengths - n)

    @property
    def experts(self) -> list[nn.Module]:
        return [self.expert.lm]

    @property
    def special_tokens(self) -> set[int]:
        return self.expert.special_tokens

    def check_vocabulary(self, base_size: int, tokenizer: PreTrainedTokenizerBase | None, base_name: str) -> None:
        self.expert.check_vocabulary(base_size, tokenizer, base_name)

    def check_length(self, num_tokens: int) -> None:
        self.expert.check_length(num_tokens, self._codes)


def filter_candidates(
    log_posterior: Float[Tensor, "b k"], logits: Float[Tensor, "b k"], filter_p: float, target_p: float
) -> Bool[Tensor, "b k"]:
    """GeDi's filter, see `GeDiGuide`. The best candidate by posterior that can be chosen at all is always kept."""
    posterior, order = log_posterior.double().sort(dim=-1, descending=True, stable=True)
    probabilities = logits.double().softmax(-1).gather(1, order)
    better = probabilities.cumsum(-1) - probabilities  # what those with a higher posterior hold
    kept = (better <= 1 - filter_p) | (posterior >= (math.log(target_p) if target_p else -math.inf))
    return torch.zeros_like(kept).scatter(1, order, kept)


def load_gedi(folder: str | Path, device: str = "cpu", dtype: torch.dtype | str = "auto") -> dict[str, Any]:
    """What `GeDiGuide` needs beside ω and the filter."""
    stored = read_codes(folder)
    if stored is None:
        raise ModelError(f"{str(folder)!r} names no control codes.", "make it with `radq train-experts --method gedi`.")
    high, low = stored["codes"]
    lm = load_causal_lm(folder, dtype=dtype, device=device)
    return {"lm": lm, "codes": (high, low), "scale": stored["scale"], "tokenizer": find_tokenizer(folder)}


def read_codes(folder: str | Path) -> dict[str, Any] | None:
    """Control codes and scale that config.json of a GeDi records; None of another model."""
    with explained(folder, "a model configuration"):
        stored, _ = PreTrainedConfig.get_config_dict(folder)
    return stored.get("gedi")
