"""Brute force: rewards and guided logits computed from scratch, one prefix at a time, straight from the formulas.

No cache of keys and values, no padding, no code of radq beyond a model's weights; everything in float64.
"""

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from families import EOS
from torch import Tensor
from transformers import PreTrainedModel

from radq.models.kinds import RadQ
from radq.models.readout import Readout
from radq.models.reward import RewardModel

_HIDDEN: WeakKeyDictionary[torch.nn.Module, dict[tuple[int, ...], Tensor]] = WeakKeyDictionary()


def _read(model: RewardModel, texts: list[tuple[int, ...]]) -> Tensor:
    """Hidden states at the ends of texts of one length, (texts, d); remembered, since no test changes a backbone."""
    known = _HIDDEN.setdefault(model, {})
    missing = [text for text in texts if text not in known]
    if missing:
        with torch.no_grad():
            output = model.backbone(input_ids=torch.tensor(missing), use_cache=False, output_hidden_states=True)
            ends = output.last_hidden_state[:, -1] if model.readout is None else _read_out(model.readout, output)
        known.update(zip(missing, ends, strict=True))
    return torch.stack([known[text] for text in texts])


def _read_out(readout: Readout, output: Any) -> Tensor:
    parts = [output.hidden_states[layer][:, -1] for layer in readout.layers]
    joined = torch.cat([part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() for part in parts], dim=-1)
    return F.gelu(joined @ readout.inner.weight.T + readout.inner.bias) @ readout.outer.weight.T + readout.outer.bias


def _with_bos(model: RewardModel, prefix: Sequence[int]) -> tuple[int, ...]:
    bos = model.config.bos_token_id
    return (bos, *prefix) if model.config.prepend_bos and list(prefix[:1]) != [bos] else tuple(prefix)


def hidden(model: RewardModel, prefix: Sequence[int]) -> Tensor:
    """Hidden state at the end of a prefix, (d,)."""
    return _read(model, [_with_bos(model, prefix)])[0]


def rewards(model: RewardModel, prefix: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """r̂(token | prefix) of each token, (tokens, a)."""
    if not isinstance(model, RadQ):
        after = _read(model, [(*_with_bos(model, prefix), token) for token in tokens])
        return after @ model.head.weight.T + model.head.bias
    h, embeddings = hidden(model, prefix), model.embedding[list(tokens)]
    columns = []
    for a in range(len(model.config.attributes)):
        marginal = embeddings @ (h @ model.head.weight[a])
        baseline = h @ model.head.baseline_weight[a] if model.config.head != "linear-nobaseline" else 0
        columns.append(baseline + marginal)
    return torch.stack(columns, 1)


def reward(model: RewardModel, prefix: Sequence[int], token: int) -> Tensor:
    """r̂(token | prefix), (a,)."""
    return rewards(model, prefix, [token])[0]


def base_logits(lm: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    with torch.no_grad():
        return lm(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].double()


def candidates(logits: Tensor, top_k: int | None, top_p: float | None) -> list[int]:
    scores = logits.tolist()
    ranked = sorted(range(len(scores)), key=lambda v: -scores[v])[:top_k]
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
    betas: dict[str, float],
    prefix: Sequence[int],
    top_k: int | None = 20,
    top_p: float | None = None,
    temperature: float = 1.0,
    clamp: bool = True,
    stops: Sequence[int] = (EOS,),
) -> Tensor:
    """z over the whole vocabulary, −∞ outside the candidates. Stop tokens keep the probability of the base model."""
    logits = base_logits(lm, prefix)
    guided = torch.full_like(logits, -torch.inf)
    tokens = candidates(logits, top_k, top_p)
    wanted = rewards(model, prefix, tokens)
    if clamp:
        low, high = torch.tensor(model.config.attribute_ranges, dtype=wanted.dtype).T
        wanted = wanted.clamp(low, high)
    shift = sum(beta * wanted[:, model.config.attributes.index(name)] for name, beta in betas.items())
    base = torch.full_like(logits, -torch.inf)
    base[tokens] = logits[tokens] / temperature
    guided[tokens] = base[tokens] + shift
    return ends_held(base, guided, stops)


def ends_held(base: Tensor, guided: Tensor, stops: Sequence[int]) -> Tensor:
    """Change the guided logits of stop tokens so that these have the probabilities that base logits give them.

    Both logits are −∞ outside the candidates, and the guided ones at words that the guide forbids.
    """
    words = [v for v in range(len(base)) if v not in stops and not base[v].isneginf()]
    odds = base.exp() / base[words].exp().sum()  # of a token against all words
    held = guided.clone()
    for stop in stops:
        held[stop] = (odds[stop] * guided[words].exp().sum()).log() if words else base[stop]
    return held


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
