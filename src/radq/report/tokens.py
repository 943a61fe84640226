"""Tokens of texts with numbers, coloured by them, for terminals and notebooks.

    scored = score_text(reward, "The view was lovely.")
    coloured([(token["token"], token["rewards"]["praise"]) for token in scored["tokens"]], low=0, high=1)

Importing this module imports no torch.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOW, HIGH = (0, 80, 180), (190, 95, 0)  # red, green and blue of the colours for low and high values


def coloured(tokens: Iterable[tuple[str, float]], low: float, high: float) -> Text:
    """Colour the background of tokens by their values: blue for low, none in the middle, orange for high.

    Blue and orange look different to colour-blind people too, and say neither good nor bad.
    """
    text = Text()
    for token, value in tokens:
        share = 0.5 if high <= low else min(max((value - low) / (high - low), 0.0), 1.0)
        strength = abs(2 * share - 1)
        colour = [int(strength * part) for part in (LOW if share < 0.5 else HIGH)]
        text.append(token, style="on #{:02x}{:02x}{:02x}".format(*colour) if strength > 0.05 else "")
    return text


def legend(low: float, high: float, meaning: str) -> Text:
    """One line that shows the colours of the lowest and the highest value and says what the values are."""
    return coloured([(" low ", low), (" to ", (low + high) / 2), (" high ", high)], low, high) + f": {meaning}"


def split_tokens(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> list[str]:
    """The piece of text that each token adds, with its spaces.

    Special tokens add nothing. If a character consists of several tokens, the last of them adds it.
    """
    texts = [str(tokenizer.decode(ids[:n], skip_special_tokens=True)).rstrip("\ufffd") for n in range(len(ids) + 1)]
    return [after[len(before) :] for before, after in pairwise(texts)]


def score_text(model: Any, text: str) -> dict[str, Any]:
    """The tokens of a text with their rewards, as they are printed as JSON."""
    import torch

    ids = model.tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        rewards = model.token_rewards(torch.tensor([ids], device=model.device))[0].tolist()  # (t, a)
    pieces = split_tokens(model.tokenizer, ids)
    tokens = [
        {"token": piece, "id": token, "rewards": dict(zip(model.config.attributes, reward, strict=True))}
        for piece, token, reward in zip(pieces, ids, rewards, strict=True)
    ]
    return {"text": text, "tokens": tokens}
