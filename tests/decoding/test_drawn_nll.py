"""The likelihoods of texts in the distributions that they were drawn from, and the divergence that follows."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from baselines import CODES, make_guide
from families import BOS, EOS, make_lm, make_number_tokenizer, make_reward
from torch import Tensor
from transformers import PreTrainedModel

from radq.decoding.generate import Generation, generate
from radq.evaluation.metrics import ScoredTexts, measure
from radq.guides.gedi import GeDiGuide
from radq.guides.reward import RewardGuide

TOKENIZER = make_number_tokenizer()
PROMPTS = ["5 9 3 12 30", "11", ""]
WEIGHTS = {"nice": 4.0, "rude": -6.0}
FILTER = {"filter_p": 0.6, "target_p": 0.7}
STOPS = [EOS, 5, 9]


def read_prompt(prompt: str) -> list[int]:
    return [int(word) for word in prompt.split()] or [BOS]


def unguided_logits(lm: PreTrainedModel, prefix: list[int], top_k: int | None, temperature: float) -> Tensor:
    base = oracle.base_logits(lm, prefix)
    tokens = oracle.candidates(base, top_k, None)
    return torch.full_like(base, -torch.inf).index_copy(0, torch.tensor(tokens), base[tokens] / temperature)


def gedi_logits(
    lm: PreTrainedModel, guide: GeDiGuide, prefix: list[int], top_k: int | None, temperature: float
) -> Tensor:
    base = unguided_logits(lm, prefix, top_k, temperature)
    tokens = torch.nonzero(base.isfinite()).flatten().tolist()
    wanted = oracle.gedi_posterior(guide.expert.lm, CODES, prefix, tokens, 1.7, (0.3, 0.7))
    guided = [base[token].item() + 6 * math.log(p) for token, p in zip(tokens, wanted, strict=True)]
    words = [place for place, token in enumerate(tokens) if token not in STOPS]  # the filter sees no others
    kept = oracle.gedi_kept([wanted[place] for place in words], [guided[place] for place in words], **FILTER)
    assert kept.count(True) < len(kept) or top_k == 1
    allowed = [place for place, keep in zip(words, kept, strict=True) if keep] or words
    filtered = torch.full_like(base, -torch.inf)
    filtered[[tokens[place] for place in allowed]] = torch.tensor(
        [guided[place] for place in allowed], dtype=base.dtype
    )
    return oracle.ends_held(base, filtered, STOPS)


def direct_nll(generation: Generation, logits_after: Any) -> float:
    """Minus the log-probability of a text's tokens, one prefix at a time; a stop token at the end does not count."""
    prefix, total = read_prompt(generation.prompt), 0.0
    for token in generation.token_ids[: generation.num_text_tokens]:
        total -= logits_after(prefix).log_softmax(0)[token].item()
        prefix = [*prefix, token]
    return total


@pytest.mark.parametrize(("top_k", "temperature"), [(6, 0.8), (None, 1.0)])
def test_tokens_have_the_likelihood_of_what_they_were_drawn_from(
    top_k: int | None, temperature: float, lm_folders: dict[str, Path]
) -> None:
    lm, model = make_lm("gpt2").double(), make_reward("q", lm_folders["gpt2"])
    gedi = make_guide("gedi", "gpt2", 6.0, **FILTER)
    assert isinstance(gedi, GeDiGuide)
    options: dict[str, Any] = {"top_k": top_k, "temperature": temperature, "kl_budget": None, "stop_token_ids": STOPS}
    ways = [
        (None, lambda prefix: unguided_logits(lm, prefix, top_k, temperature)),
        (
            RewardGuide(model, WEIGHTS),
            lambda prefix: oracle.guided_logits(lm, model, WEIGHTS, prefix, top_k, None, temperature, stops=STOPS),
        ),
        (gedi, lambda prefix: gedi_logits(lm, gedi, prefix, top_k, temperature)),
    ]
    reasons = set()
    for guide, logits_after in ways:
        for generation in generate(lm, TOKENIZER, PROMPTS, guide, max_new_tokens=5, samples=3, seed=1, **options):
            assert generation.drawn_nll == pytest.approx(direct_nll(generation, logits_after), abs=1e-4)
            reasons.add(generation.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_text_without_chance_has_the_likelihood_one(lm_folders: dict[str, Path]) -> None:
    lm, guide = make_lm("gpt2"), RewardGuide(make_reward("q", lm_folders["gpt2"]), WEIGHTS)
    for generation in generate(lm, TOKENIZER, PROMPTS, guide, temperature=0.0):
        assert generation.drawn_nll == 0
        assert generation.nll > 0


@pytest.mark.slow
@pytest.mark.parametrize(("top_k", "temperature"), [(None, 1.0), (8, 0.7)])
def test_the_divergence_of_samples_is_the_exact_one(
    top_k: int | None, temperature: float, lm_folders: dict[str, Path]
) -> None:
    """Texts of two tokens: KL(guided ‖ base) of the first, and that of the second after each first one."""
    lm, model = make_lm("gpt2").double(), make_reward("q", lm_folders["gpt2"])
    options: dict[str, Any] = {"top_k": top_k, "temperature": temperature}

    def step(prefix: list[int]) -> tuple[Tensor, float]:
        guided = oracle.guided_logits(lm, model, WEIGHTS, prefix, clamp=True, stops=(), **options).log_softmax(0)
        gaps = guided - oracle.base_logits(lm, prefix).log_softmax(0)
        return guided.exp(), (guided.exp() * gaps)[guided.isfinite()].sum().item()

    first, exact = step([11])
    exact += sum(p * step([11, token])[1] for token, p in enumerate(first.tolist()) if p > 0)
    drawn = generate(
        *(lm, TOKENIZER, ["11"], RewardGuide(model, WEIGHTS)),
        **(options | {"kl_budget": None, "max_new_tokens": 2, "samples": 2000, "stop_token_ids": []}),
    )
    rows = {"nll": [g.nll for g in drawn], "drawn_nll": [g.drawn_nll for g in drawn]}
    tokens = np.array([[g.num_text_tokens for g in drawn]])
    arrays = {name: np.array([values]) for name, values in rows.items()}
    found = measure(["kl"], ScoredTexts([["a"] * len(drawn)], tokens=tokens, **arrays))["kl"].value
    gaps = (arrays["nll"] - arrays["drawn_nll"])[0] / 2
    assert exact > 0.2
    assert abs(found - exact / 2) < 3 * gaps.std() / math.sqrt(len(gaps))
