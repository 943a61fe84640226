"""How likely continuations are after their prompts, under a causal language model.

    found = measure_likelihoods(lm, tokenizer, prompts, continuations)
    np.exp(found.nll / found.tokens)  # perplexity of each

Prompt and continuation are tokenised as one text, with the special tokens the model expects, as DExperts does it. The
continuation's tokens are those after the longest common beginning with the tokens of the prompt alone, so a token that
reaches over the boundary belongs to the continuation. Axes: b batch, t time, c tokens of the longest continuation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.errors import ContextLengthError, OptionError
from radq.models import kv_cache
from radq.models.loading import Wrappable, max_positions
from radq.models.vocabulary import find_bos, tokenise
from radq.numerics import in_smaller_batches, log_probabilities, same_kernels


@dataclass(frozen=True)
class Likelihoods:
    """Of n continuations. One that is blank has no tokens, and a negative log-likelihood of 0."""

    nll: Float[
        np.ndarray, " n"
    ]  # minus the sum of its tokens' log-probabilities; infinite where the model excludes one
    tokens: Int[np.ndarray, " n"]
    truncated: int  # pairs too long for the model, whose prompts lost their beginnings


@dataclass(frozen=True)
class _Pair:
    prompt: list[int]
    continuation: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.continuation)


@same_kernels()
def measure_likelihoods(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    continuations: Sequence[str],
    batch_size: int = 32,
    progress: bool = False,
) -> Likelihoods:
    """Prompts and continuations side by side: one likelihood per pair, in order, whatever the batches."""
    if len(prompts) != len(continuations):
        raise OptionError(
            f"there are {len(prompts)} prompts and {len(continuations)} continuations.", "give them in pairs."
        )
    whole = encode_pairs(lm, tokenizer, prompts, continuations)
    pairs = [_fit(pair, max_positions(lm.config)) for pair in whole]
    nll, tokens = np.zeros(len(pairs)), np.array([len(pair.continuation) for pair in pairs], dtype=np.int64)
    by_length = sorted(np.flatnonzero(tokens), key=lambda n: -len(pairs[n]))
    with tqdm(total=len(by_length), unit="text", desc="perplexity", disable=not progress) as bar:
        while by_length:
            some, batch_size = in_smaller_batches(
                lambda size: _read(lm, [pairs[n] for n in by_length[:size]]).cpu().numpy(), batch_size
            )
            nll[by_length[: len(some)]] = some
            del by_length[: len(some)]
            bar.update(len(some))
    return Likelihoods(nll, tokens, sum(len(a) < len(b) for a, b in zip(pairs, whole, strict=True)))


def encode_pairs(
    lm: Wrappable, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], continuations: Sequence[str]
) -> list[_Pair]:
    """Token ids; where nothing precedes the continuation, a BOS does."""
    texts = [prompt + continuation for prompt, continuation in zip(prompts, continuations, strict=True)]
    distinct = list(dict.fromkeys(prompts))  # many samples have one prompt
    bos = find_bos(lm.config, tokenizer)
    alone = dict(zip(distinct, tokenise(tokenizer, distinct, bos), strict=True))
    pairs = []
    for prompt, continuation, ids in zip(prompts, continuations, tokenise(tokenizer, texts, bos), strict=True):
        begin = alone[prompt]
        differs = (n for n, (a, b) in enumerate(zip(begin, ids, strict=False)) if a != b)
        cut = next(differs, min(len(begin), len(ids))) if continuation.strip() else len(ids)
        pairs.append(_Pair(ids[:cut] or [bos], ids[cut:]))
    return pairs


def _fit(pair: _Pair, positions: int | None) -> _Pair:
    """What is too long loses the beginning of its prompt, all but a token at most."""
    if positions is None or len(pair) <= positions:
        return pair
    room = positions - len(pair.continuation)
    if room < 1:
        raise ContextLengthError(
            f"a continuation has {len(pair.continuation)} tokens, the model that measures perplexity {positions} "
            "positions.",
            "shorten the continuations, or take another model.",
        )
    return _Pair(pair.prompt[-room:], pair.continuation)


@torch.no_grad()
def _read(lm: Wrappable, pairs: list[_Pair]) -> Float[Tensor, " b"]:
    """Negative log-likelihoods of a batch, padded on the left, so that all continuations end together."""
    longest, c = max(map(len, pairs)), max(len(pair.continuation) for pair in pairs)
    padding = [[0] * (longest - len(pair)) for pair in pairs]
    tokens = torch.tensor([pad + p.prompt + p.continuation for pad, p in zip(padding, pairs, strict=True)])
    mask = torch.tensor([pad + [1] * len(pair) for pad, pair in zip(padding, pairs, strict=True)])
    scored = torch.arange(-c, 0) >= -torch.tensor([[len(pair.continuation)] for pair in pairs])  # (b, c)
    return _sum_nll(lm, tokens.to(lm.device), mask.to(lm.device), scored.to(lm.device))


def _sum_nll(
    lm: Wrappable, tokens: Int[Tensor, "b t"], mask: Int[Tensor, "b t"], scored: Bool[Tensor, "b c"]
) -> Float[Tensor, " b"]:
    c = scored.shape[1]
    last: dict[str, Any] = {"logits_to_keep": c + 1} if kv_cache.accepts(lm, "logits_to_keep") else {}
    logits = kv_cache.start(lm, tokens, mask, **last)[0].logits[:, -c - 1 : -1]  # (b, c, v): each scores the next token
    return -torch.where(scored, log_probabilities(logits, tokens[:, -c:]).double(), 0.0).sum(1)
