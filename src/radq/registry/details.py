"""Tokens of a text and the candidates that they were drawn from, with their texts and numbers, as clients get them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from radq.decoding.steering import Proposal
from radq.decoding.text import UNFINISHED
from radq.errors import ContextLengthError, OptionError

MOST_CANDIDATES = 64  # that are told about a token
LEAST = -9999.0  # in place of −∞, which JSON does not have


@dataclass(frozen=True)
class Candidate:
    """A token that could have been drawn; probabilities are over the candidates, at the temperature of the request."""

    id: int
    base_probability: float
    probability: float
    shift: float
    rewards: dict[str, float]


@dataclass(frozen=True)
class Drawn:
    """A token that was drawn, with the text that became final with it."""

    id: int
    piece: str
    shift: float
    kl: float
    base_logprob: float  # under the base model alone, over the whole vocabulary, at temperature 1
    logprob: float  # in the distribution that it was drawn from
    rewards: dict[str, float] | None = None
    candidates: list[Candidate] | None = None

    def describe(self, show: Callable[[int], str]) -> dict[str, Any]:
        """Describe the numbers as a part of an answer; `show` returns the text of a token."""
        candidates = [{"id": one.id, "token": show(one.id), **_numbers(one)} for one in self.candidates or []]
        return {
            "id": self.id,
            "token": show(self.id),
            "piece": self.piece,
            "logprob": make_finite(self.logprob),
            "base_logprob": make_finite(self.base_logprob),
            "shift": self.shift,
            "kl": self.kl,
            "rewards": self.rewards or {},
            "candidates": candidates,
        }


def _numbers(candidate: Candidate) -> dict[str, Any]:
    return {name: value for name, value in vars(candidate).items() if name != "id"}


@dataclass(frozen=True)
class CandidateRow:
    """All candidates of one token, or only those that clients are told of."""

    ids: np.ndarray  # (k,)
    base: np.ndarray  # (k,): probabilities under the base model
    guided: np.ndarray  # (k,)
    shift: np.ndarray  # (k,)
    rewards: dict[str, np.ndarray]  # (k,) each

    def find(self, token: int) -> int | None:
        """Find the place of a token; None if it is no candidate."""
        (places,) = np.nonzero(self.ids == token)
        return int(places[0]) if len(places) else None

    def select(self, chosen: int) -> np.ndarray:
        """Select the candidates that clients are told of: the most likely ones, and the one at the chosen place."""
        order = np.argsort(-self.base, kind="stable")[:MOST_CANDIDATES]
        order = order[self.base[order] > 0]
        return order if chosen in order else np.append(order[: MOST_CANDIDATES - 1], chosen)

    def take(self, places: np.ndarray) -> "CandidateRow":
        rewards = {name: values[places] for name, values in self.rewards.items()}
        return CandidateRow(self.ids[places], self.base[places], self.guided[places], self.shift[places], rewards)

    def tell(self, chosen: int) -> tuple[dict[str, float], list[Candidate]]:
        """Return the rewards of the candidate at the chosen place, and the candidates that clients are told of."""
        return self._rewards(chosen), [
            Candidate(
                int(self.ids[place]),
                float(self.base[place]),
                float(self.guided[place]),
                float(max(self.shift[place], -1e30)),  # a guide forbids a candidate by −∞, which JSON has not
                self._rewards(place),
            )
            for place in self.select(chosen).tolist()
        ]

    def _rewards(self, place: int) -> dict[str, float]:
        return {name: float(values[place]) for name, values in self.rewards.items()}


class StepNumbers:
    """The candidates of a step for all its rows, on the host."""

    def __init__(self, proposal: Proposal):
        self.candidates = proposal.candidates.cpu().numpy()
        self.base = proposal.base.double().softmax(-1).cpu().numpy()
        self.guided = proposal.logits.double().softmax(-1).cpu().numpy()
        self.shift = proposal.shift.double().cpu().numpy()
        parts = proposal.rewards or ()
        self.rewards = np.concatenate([part.double().cpu().numpy() for part in parts], axis=2) if parts else None

    def row(self, row: int, places: Mapping[str, int]) -> CandidateRow:
        """Return the candidates of one row; `places` are those of the names of guides among the strengths."""
        rewards = {} if self.rewards is None else {name: self.rewards[row, :, place] for name, place in places.items()}
        return CandidateRow(self.candidates[row], self.base[row], self.guided[row], self.shift[row], rewards)


def summarise(drawn: Sequence[Drawn], names: Sequence[str]) -> dict[str, Any]:
    """Compute means over the tokens of a text, and those of rewards where the guides tell them."""
    n = max(1, len(drawn))
    rewards = {
        name: sum(one.rewards[name] for one in drawn if one.rewards) / n
        for name in names
        if drawn and drawn[0].rewards is not None
    }
    return {
        "kl": sum(one.kl for one in drawn) / n,
        "perplexity": perplexity(sum(one.base_logprob for one in drawn) / n),
        "shift": sum(one.shift for one in drawn) / n,
        "rewards": rewards,
    }


def perplexity(mean_log_probability: float) -> float:
    """Compute exp(−mean), which is finite also where a token is impossible for the base model."""
    return math.exp(min(-mean_log_probability, 700.0))


def make_finite(number: float) -> float:
    return number if math.isfinite(number) else LEAST


# --- scores of texts that clients send ---


def check_scored(text: str, token_ids: Sequence[int], limit: int) -> None:
    """Refuse a text without tokens, or with too many."""
    if not token_ids or not text.strip():
        raise OptionError("text must not be empty.", "give a text with at least one token.")
    if len(token_ids) > limit:
        raise ContextLengthError(f"a text may have at most {limit} tokens, got {len(token_ids)}.", "shorten it.")


def describe_scores(
    token_ids: Sequence[int],
    likelihoods: Sequence[float],
    rewards: Mapping[str, Sequence[float]],
    show: Callable[[Sequence[int]], list[str]],
) -> dict[str, Any]:
    """Describe the scores of a text as an answer.

    Args:
        likelihoods: the log-probability of each token but the first under the base model.
        rewards: the reward of each token by each name.
        show: gives the text of each token.
    """
    # A reward model that has diverged gives NaN, which JSON does not have.
    found = {name: [one if math.isfinite(one) else None for one in values] for name, values in rewards.items()}
    tokens = [
        {
            "id": token,
            "token": shown,
            "logprob": make_finite(likelihoods[place - 1]) if place else None,
            "rewards": {name: values[place] for name, values in found.items()},
        }
        for place, (token, shown) in enumerate(zip(token_ids, show(token_ids), strict=True))
    ]
    mean = sum(likelihoods) / len(likelihoods) if likelihoods else 0.0
    last = {name: values[-1] for name, values in found.items()}
    return {"tokens": tokens, "rewards": last, "perplexity": perplexity(mean)}


ANCHOR = "a"  # single tokens are decoded after it, since some tokenizers drop a space at the beginning of a text


class TokenTexts:
    """Shows the tokens of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self._anchor = tokenizer(ANCHOR, add_special_tokens=False).input_ids
        self._before = str(tokenizer.decode(self._anchor))
        self.show = lru_cache(maxsize=65536)(self._show)

    def _show(self, token: int) -> str:
        """Show a single token as text, with its space; special tokens are shown by their names."""
        if token in self.tokenizer.all_special_ids:
            return str(self.tokenizer.convert_ids_to_tokens(token))
        return self._decode([token])

    def show_each(self, tokens: Sequence[int]) -> list[str]:
        """Show the tokens of a text. Of several that share a character, the last one shows it, and the others nothing.

        Special tokens are shown by their names.
        """
        found: list[str] = []
        held: list[int] = []  # tokens of a character that is not whole yet
        for token in tokens:
            shown = self._decode([*held, token]) if held else self.show(token)
            whole = token in self.tokenizer.all_special_ids or not shown.endswith(UNFINISHED)
            held = [] if whole else [*held, token]
            found.append(shown if whole else "")
        if held:
            found[-1] = self._decode(held)
        return found

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode([*self._anchor, *tokens]))[len(self._before) :]
