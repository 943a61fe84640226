"""Brute force: rewards and guided logits recomputed from scratch, one prefix at a time, straight from the formulas.

No cache, no padding, no batch, no code of radq beyond reading a model's weights; everything in float64.
"""

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from radq.models.reward import RadQ, RewardModel

_HIDDEN: WeakKeyDictionary[torch.nn.Module, dict[tuple[int, ...], Tensor]] = WeakKeyDictionary()


def hidden(model: RewardModel, prefix: Sequence[int], *token: int) -> Tensor:
    """Hidden state at the end of a prefix, or at a token after it, (d,).

    Results are cached: tests ask for many tokens after one prefix, and none of them changes a backbone.
    """
    bos = model.config.bos_token_id
    if model.config.prepend_bos and list(prefix[:1]) != [bos]:
        prefix = [bos, *prefix]
    known, text = _HIDDEN.setdefault(model.backbone, {}), (*prefix, *token)
    if text not in known:
        with torch.no_grad():
            known[text] = model.backbone(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[0, -1]
    return known[text]


def reward(model: RewardModel, prefix: Sequence[int], token: int) -> Tensor:
    """r̂(token | prefix), (a,)."""
    if not isinstance(model, RadQ):
        return model.head.weight @ hidden(model, prefix, token) + model.head.bias
    h, e = hidden(model, prefix), model.embedding[token]
    rewards = []
    for a in range(len(model.config.attributes)):
        marginal = h @ model.head.weight[a] @ e
        baseline = h @ model.head.baseline_weight[a] if model.config.head != "linear-nobaseline" else 0
        rewards.append(baseline + marginal)
    return torch.stack(rewards)


def base_logits(lm: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return lm(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].double()


def candidates(logits: Tensor, top_k: int | None, top_p: float | None) -> list[int]:
    ranked = sorted(range(len(logits)), key=lambda v: -logits[v].item())[:top_k]
    if top_p is None:
        return ranked
    probabilities = logits[ranked].softmax(0).tolist()
    kept, mass = [], 0.0
    for token, probability in zip(ranked, probabilities, strict=True):
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += probability
    return kept


def guided_logits(
    lm: PreTrainedModel,
    model: RewardModel,
    weights: dict[str, float],
    prefix: Sequence[int],
    top_k: int | None = 20,
    top_p: float | None = None,
    temperature: float = 1.0,
    clamp: bool = True,
) -> Tensor:
    """z over the whole vocabulary, −∞ outside the candidates."""
    logits = base_logits(lm, prefix)
    guided = torch.full_like(logits, -torch.inf)
    for token in candidates(logits, top_k, top_p):
        rewards = reward(model, prefix, token)
        if clamp:
            low, high = torch.tensor(model.config.attribute_ranges, dtype=rewards.dtype).T
            rewards = rewards.clamp(low, high)
        shift = sum(beta * rewards[model.config.attributes.index(name)] for name, beta in weights.items())
        guided[token] = logits[token] / temperature + shift
    return guided


# --- baselines ---


def _run(lm: PreTrainedModel, code: Sequence[int], text: Sequence[int]) -> tuple[list[int], Tensor]:
    """The tokens of BOS, control code and text, with one BOS only, and the logits at each of them."""
    bos = lm.config.bos_token_id
    tokens = [bos, *code, *(text[1:] if list(text[:1]) == [bos] else text)]
    with torch.no_grad():
        return tokens, lm(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double()


def dexperts_shift(
    expert: PreTrainedModel, anti_expert: PreTrainedModel, alpha: float, text: Sequence[int], tokens: Sequence[int]
) -> list[float]:
    wanted, unwanted = (_run(lm, [], text)[1][-1] for lm in (expert, anti_expert))
    return [alpha * (wanted[token] - unwanted[token]).item() for token in tokens]


def gedi_posterior(
    lm: PreTrainedModel,
    codes: Sequence[Sequence[int]],
    text: Sequence[int],
    tokens: Sequence[int],
    scale: float = 1.0,
    priors: Sequence[float] = (0.5, 0.5),
) -> list[float]:
    """P(c | text, token) of the first class, for each token."""
    weights = []
    for code, prior in zip(codes, priors, strict=True):
        read, logits = _run(lm, code, text)
        log_probabilities = logits.log_softmax(-1)
        first = 1 + len(code)
        past = sum(log_probabilities[j - 1, read[j]].item() for j in range(first, len(read)))
        length = len(read) - first + 1
        weights.append([prior * math.exp(past + log_probabilities[-1, v].item()) ** (scale / length) for v in tokens])
    return [wanted / (wanted + other) for wanted, other in zip(*weights, strict=True)]


def gedi_kept(posteriors: Sequence[float], logits: Sequence[float], filter_p: float, target_p: float) -> list[bool]:
    """GeDi's filter: remove the worst candidates one by one while the removed ones hold less than filter_p."""
    probabilities = torch.tensor(logits, dtype=torch.float64).softmax(0).tolist()
    kept, gone = [True] * len(posteriors), 0.0
    for index in sorted(range(len(posteriors)), key=lambda i: posteriors[i]):
        gone += probabilities[index]
        kept[index] = gone >= filter_p or posteriors[index] >= target_p
    return kept
