"""The likelihoods of continuations given their prompts, under a causal language model.

    likelihoods = measure_likelihoods(lm, tokenizer, prompts, continuations)
    np.exp(likelihoods.nll / likelihoods.tokens)  # the perplexity of each continuation

Prompt and continuation are tokenised as one text, with the special tokens that the model expects, as DExperts does it.
The continuation's tokens are those after the longest common beginning with the tokens of the prompt alone, so a token
that reaches over the boundary belongs to the continuation. Axes: b batch, t time, c tokens of the longest continuation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.errors import ContextLengthError, OptionError
from radq.models import kv_cache
from radq.models.loading import Wrappable, max_positions, num_logits
from radq.models.vocabulary import find_bos, tokenise
from radq.numerics import in_smaller_batches, log_probabilities, pad_left, same_kernels, texts_per_forward

KEEP = "logits_to_keep"  # the argument of a forward that limits logits to the last tokens


@dataclass(frozen=True)
class Likelihoods:
    """The negative log-likelihoods of n continuations, and the numbers of their tokens; both are 0 for a blank one."""

    nll: Float[np.ndarray, " n"]  # infinite where the model excludes a token
    tokens: Int[np.ndarray, " n"]
    truncated: int  # how many prompts lost their beginnings because the text was too long for the model


@dataclass(frozen=True)
class _Pair:
    """The token ids of a prompt and of its continuation."""

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
    """Measure one likelihood per pair of prompt and continuation, in order; batches do not change the result.

    At most `batch_size` pairs are measured together, and fewer if their logits would take too much memory.
    """
    if len(prompts) != len(continuations):
        raise OptionError(
            f"prompts and continuations must come in pairs, got {len(prompts)} and {len(continuations)}.",
            "repeat the prompt of each continuation.",
        )
    whole = encode_pairs(lm, tokenizer, prompts, continuations)
    pairs = [_fit(pair, max_positions(lm.config)) for pair in whole]
    nll, tokens = np.zeros(len(pairs)), np.array([len(pair.continuation) for pair in pairs], dtype=np.int64)
    by_length = sorted(np.flatnonzero(tokens), key=lambda n: -len(pairs[n]))
    keeps_last = kv_cache.accepts(lm, KEEP)
    positions = max((len(pair.continuation) + 1 if keeps_last else len(pair) for pair in pairs), default=1)
    batch_size = min(batch_size, texts_per_forward(positions * num_logits(lm), lm.device))
    with tqdm(total=len(by_length), unit="text", desc="perplexity", disable=not progress) as bar:
        while by_length:
            some, batch_size = in_smaller_batches(
                lambda size: _measure_batch(lm, [pairs[n] for n in by_length[:size]]).cpu().numpy(), batch_size
            )
            nll[by_length[: len(some)]] = some
            del by_length[: len(some)]
            bar.update(len(some))
    return Likelihoods(nll, tokens, sum(len(a) < len(b) for a, b in zip(pairs, whole, strict=True)))


def encode_pairs(
    lm: Wrappable, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], continuations: Sequence[str]
) -> list[_Pair]:
    """Tokenise prompts and continuations. A continuation that nothing precedes gets a BOS before it."""
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
    """Cut the beginning of the prompt where the pair is too long; at least one token of the prompt stays."""
    if positions is None or len(pair) <= positions:
        return pair
    room = positions - len(pair.continuation)
    if room < 1:
        raise ContextLengthError(
            f"a continuation must have less than {positions} tokens for the model that measures perplexity, "
            f"got {len(pair.continuation)}.",
            "shorten the continuations, or use another model.",
        )
    return _Pair(pair.prompt[-room:], pair.continuation)


@torch.no_grad()
def _measure_batch(lm: Wrappable, pairs: list[_Pair]) -> Float[Tensor, " b"]:
    """Compute the negative log-likelihoods of a batch, padded on the left, so that all continuations end together."""
    input_ids, attention_mask = pad_left([pair.prompt + pair.continuation for pair in pairs], device=lm.device)
    c = max(len(pair.continuation) for pair in pairs)
    scored = torch.arange(-c, 0) >= -torch.tensor([[len(pair.continuation)] for pair in pairs])  # (b, c)
    last: dict[str, Any] = {KEEP: c + 1} if kv_cache.accepts(lm, KEEP) else {}
    output, _ = kv_cache.start(lm, input_ids, attention_mask, **last)
    logits = output["logits"][:, -c - 1 : -1]  # (b, c, v): of the next token
    chosen = log_probabilities(logits, input_ids[:, -c:]).double()
    return -torch.where(scored.to(lm.device), chosen, 0.0).sum(1)
