"""Scores of texts that clients send: the log-probability and the rewards of each token."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from radq.errors import ContextLengthError, OptionError
from radq.serving.details import make_finite, perplexity


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
    tokens = [
        {
            "id": token,
            "token": shown,
            "logprob": make_finite(likelihoods[place - 1]) if place else None,
            "rewards": {name: values[place] for name, values in rewards.items()},
        }
        for place, (token, shown) in enumerate(zip(token_ids, show(token_ids), strict=True))
    ]
    mean = sum(likelihoods) / len(likelihoods) if likelihoods else 0.0
    last = {name: values[-1] for name, values in rewards.items()}
    return {"tokens": tokens, "rewards": last, "perplexity": perplexity(mean)}
