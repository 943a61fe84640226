"""Tokens of a text and the candidates that they were drawn from, with their texts and numbers, as clients get them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from radq.decoding.steering import Proposal
from radq.decoding.text import UNFINISHED, check_size
from radq.errors import ContextLengthError, OptionError
from radq.models.vocabulary import find_bos, tokenise

MOST_CANDIDATES = 64  # that are told about a token
LEAST = -9999.0  # in place of −∞, which JSON does not have


@dataclass(frozen=True, eq=False)
class CandidateRow:
    """All tokens that could have been drawn as one token, or only those that clients are told of."""

    ids: np.ndarray  # (k,)
    base: np.ndarray  # (k,): probabilities under the base model, at the temperature of the request
    guided: np.ndarray  # (k,): probabilities with guides
    shift: np.ndarray  # (k,)
    rewards: dict[str, np.ndarray]  # (k,) each

    def find(self, token: int) -> int | None:
        """Find the index of a token; None if it is no candidate."""
        return next(iter(np.flatnonzero(self.ids == token).tolist()), None)

    def select(self, chosen: int) -> np.ndarray:
        """Select the candidates that clients are told of: the most likely ones, and the chosen one."""
        order = np.argsort(-self.base, kind="stable")[:MOST_CANDIDATES]
        order = order[self.base[order] > 0]
        return order if chosen in order else np.append(order[: MOST_CANDIDATES - 1], chosen)

    def take(self, indices: np.ndarray) -> "CandidateRow":
        rewards = {name: values[indices] for name, values in self.rewards.items()}
        return CandidateRow(self.ids[indices], self.base[indices], self.guided[indices], self.shift[indices], rewards)

    def rewards_of(self, index: int) -> dict[str, float]:
        return {name: float(values[index]) for name, values in self.rewards.items()}

    def describe(self, show: Callable[[int], str]) -> list[dict[str, Any]]:
        return [
            {
                "id": token,
                "token": show(token),
                "base_probability": float(self.base[index]),
                "probability": float(self.guided[index]),
                "shift": float(max(self.shift[index], -1e30)),  # a guide forbids a token by −∞, which JSON has not
                "rewards": self.rewards_of(index),
            }
            for index, token in enumerate(self.ids.tolist())
        ]


@dataclass(frozen=True)
class DrawnToken:
    """A token that was drawn, with the text that became final with it."""

    id: int
    piece: str
    shift: float
    kl: float
    base_logprob: float  # under the base model alone, over the whole vocabulary, at temperature 1
    logprob: float  # in the distribution that it was drawn from
    rewards: dict[str, float] | None = None
    candidates: CandidateRow | None = None

    def describe(self, show: Callable[[int], str]) -> dict[str, Any]:
        """Describe the numbers as a part of an answer; `show` returns the text of a token."""
        finite = {name: make_finite(getattr(self, name)) for name in ("logprob", "base_logprob")}
        candidates = [] if self.candidates is None else self.candidates.describe(show)
        described = {"token": show(self.id), "rewards": self.rewards or {}, "candidates": candidates}
        return {**vars(self), **finite, **described}


class StepNumbers:
    """The candidates of a step for all its rows, on the host."""

    def __init__(self, proposal: Proposal):
        probabilities = (logits.double().softmax(-1) for logits in (proposal.base, proposal.logits))
        self.numbers = [part.cpu().numpy() for part in (proposal.candidates, *probabilities, proposal.shift.double())]
        self.rewards = [part.double().cpu().numpy() for part in proposal.rewards or ()]

    def row(self, row: int, columns: Mapping[str, int]) -> CandidateRow:
        """Return the candidates of one row; `columns` are those of the names of guides among the strengths."""
        told = np.concatenate([part[row] for part in self.rewards], axis=1) if self.rewards else None
        rewards = {} if told is None else {name: told[:, column] for name, column in columns.items()}
        return CandidateRow(*(part[row] for part in self.numbers), rewards=rewards)


def summarise(tokens: Sequence[DrawnToken], names: Sequence[str]) -> dict[str, Any]:
    """Compute means over the tokens of a text, and those of rewards where the guides tell them."""
    n = max(1, len(tokens))
    told = names if tokens and tokens[0].rewards is not None else ()
    return {
        "kl": sum(token.kl for token in tokens) / n,
        "perplexity": perplexity(sum(token.base_logprob for token in tokens) / n),
        "shift": sum(token.shift for token in tokens) / n,
        "rewards": {name: sum(token.rewards[name] for token in tokens if token.rewards) / n for name in told},
    }


def perplexity(mean_log_probability: float) -> float:
    """Compute exp(−mean), which is finite also where a token is impossible for the base model."""
    return math.exp(min(-mean_log_probability, 700.0))


def make_finite(number: float) -> float:
    return number if math.isfinite(number) else LEAST


# --- scores of texts that clients send ---


def encode_scored(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, text: str, limit: int) -> list[int]:
    """Tokenise a text to be scored; refuse one without tokens, or with too many."""
    check_size(tokenizer, text, limit)
    token_ids = tokenise(tokenizer, [text], find_bos(config, tokenizer))[0]
    if not token_ids or not text.strip():
        raise OptionError("text must not be empty.", "give a text with at least one token.")
    if len(token_ids) > limit:
        raise ContextLengthError(f"a text may have at most {limit} tokens, got {len(token_ids)}.", "shorten it.")
    return token_ids


def describe_scores(
    token_ids: Sequence[int],
    likelihoods: Sequence[float],
    rewards: Mapping[str, Sequence[float]],
    show: Callable[[Sequence[int]], list[str]],
) -> dict[str, Any]:
    """Describe the scores of a text as an answer; `likelihoods` are those of all tokens but the first."""
    # A reward model that has diverged gives NaN, which JSON does not have.
    told = {name: [one if math.isfinite(one) else None for one in values] for name, values in rewards.items()}
    tokens = [
        {
            "id": token,
            "token": shown,
            "logprob": make_finite(likelihoods[position - 1]) if position else None,
            "rewards": {name: values[position] for name, values in told.items()},
        }
        for position, (token, shown) in enumerate(zip(token_ids, show(token_ids), strict=True))
    ]
    mean = sum(likelihoods) / len(likelihoods) if likelihoods else 0.0
    return {"tokens": tokens, "rewards": tokens[-1]["rewards"], "perplexity": perplexity(mean)}


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
        """Show the tokens of a text. Of several that share a character, the last one shows it, the others nothing."""
        texts: list[str] = []
        held: list[int] = []  # tokens of a character that is not whole yet
        for token in tokens:
            shown = self._decode([*held, token]) if held else self.show(token)
            whole = token in self.tokenizer.all_special_ids or not shown.endswith(UNFINISHED)
            held = [] if whole else [*held, token]
            texts.append(shown if whole else "")
        if held:
            texts[-1] = self._decode(held)
        return texts

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode([*self._anchor, *tokens]))[len(self._before) :]
