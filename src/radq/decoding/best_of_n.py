"""Best of n: draw n unguided texts and keep the one with the highest reward, a baseline for guided decoding.

best_of_n(lm, tokenizer, prompts, model, {"toxicity": -1.0}, n=10)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from radq.decoding.config import check_counts
from radq.decoding.generate import Generation, check_guide, generate
from radq.decoding.text import encode_prompts
from radq.guides.reward import RewardGuide
from radq.models.loading import Wrappable
from radq.models.reward import RewardModel
from radq.numerics import in_smaller_batches, leave_out_unknown, pad_left, take_last
from radq.settings import renamed


@renamed(num_samples="samples")
def best_of_n(
    lm: Wrappable,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    model: RewardModel,
    beta: Mapping[str, float],
    n: int,
    top_k: int | None = 20,
    top_p: float | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 20,
    samples: int = 1,
    seed: int = 0,
    *,
    batch_size: int | None = None,
    **options: Any,
) -> list[Generation]:
    """Draw n unguided continuations for each one returned, and keep the one with the highest Σ_a β_a r̂_a at its end.

    The reward is that of the last token of prompt and continuation, without a stop token, since training texts end
    without one. So an empty continuation has the reward of its prompt. Among equal rewards, the first one drawn is
    kept. Sample s of prompt p is the best of the samples n·s to n·s + n − 1 that `generate` draws with the same seed.
    The `drawn_nll` of a kept sample is its own minus log n − (n − 1)/n nats, the largest divergence that keeping the
    best of n can have. At most `batch_size` texts are drawn, or scored, at once; by default as many as fit into memory
    are drawn, and 64 scored. Other options are those of `generate`.
    """
    check_counts(n=n)
    guide = RewardGuide(model, beta)
    encoded = encode_prompts(lm.config, tokenizer, prompts, max_new_tokens)
    check_guide(guide, lm, tokenizer, encoded, max_new_tokens)
    options["batch_size"] = batch_size
    drawn = generate(
        lm, tokenizer, prompts, None, top_k, top_p, temperature, max_new_tokens, n * samples, seed, **options
    )
    texts = [
        encoded[row // (n * samples)] + generation.token_ids[: generation.num_text_tokens]
        for row, generation in enumerate(drawn)
    ]
    scores = score_texts(model, beta, texts, batch_size or 64)
    best = scores.view(-1, n).numpy().argmax(1)  # argmax takes the first among equal scores
    kept = [drawn[group * n + index] for group, index in enumerate(best)]
    divergence = math.log(n) - (n - 1) / n
    return [replace(generation, drawn_nll=generation.drawn_nll - divergence) for generation in kept]


@torch.no_grad()
def score_texts(
    model: RewardModel, beta: Mapping[str, float], texts: Sequence[Sequence[int]], batch_size: int = 64
) -> Float[Tensor, " texts"]:
    """Compute Σ_a β_a r̂_a at the last token of each text. Tokens that the reward model does not know are left out."""
    columns = [model.config.attributes.index(name) for name in beta]
    strengths = torch.tensor(list(beta.values()), dtype=torch.float64)
    scores: list[Tensor] = []

    def score(size: int) -> Float[Tensor, " size"]:
        padded = pad_left(texts[first : first + size], device=model.device)
        input_ids, attention_mask = leave_out_unknown(*padded, model.vocabulary.num_known)
        rewards = model.token_rewards(input_ids, attention_mask)  # (texts, t, a)
        return take_last(rewards, attention_mask)[:, columns].double().cpu() @ strengths

    while (first := sum(map(len, scores))) < len(texts):
        some, batch_size = in_smaller_batches(score, batch_size)
        scores.append(some)
    return torch.cat(scores)
