"""Best of n equals drawing and judging by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from families import BOS, EOS, make_lm, make_number_tokenizer, make_readout, make_reward

from radq.decoding.best_of_n import best_of_n, score_texts
from radq.decoding.generate import Generation, generate
from radq.errors import ContextLengthError, OptionError, UnknownAttributeError, VocabularyError
from radq.models.kinds import RadQ
from radq.models.reward import RewardModel

TOKENIZER = make_number_tokenizer()
PROMPTS = ["5 9 3 12 30", "11", ""]
WEIGHTS = {"nice": 4.0, "rude": -6.0}


@pytest.mark.parametrize("kind", ["q", "v", "v-readout"])
def test_the_best_of_n_by_hand(kind: str, lm_folders: dict[str, Path], tmp_path: Path) -> None:
    lm = make_lm("gpt2").double()
    if kind == "v-readout":
        make_readout("v", lm_folders["gpt2"], dtype=torch.float64).save_pretrained(tmp_path / "value")
        model = RewardModel.from_pretrained(tmp_path / "value", lm=lm)
    else:
        model = make_reward(kind, lm_folders["gpt2"])
    stops = [EOS, 5, 9]
    options = {"max_new_tokens": 5, "seed": 3, "top_k": 8, "stop_token_ids": stops}
    drawn = generate(lm, TOKENIZER, PROMPTS, samples=6, **options)
    expected = []
    for group in range(0, len(drawn), 3):
        scores = []
        for generation in drawn[group : group + 3]:
            prompt = [int(word) for word in generation.prompt.split()] or [BOS]
            text = prompt + [token for token in generation.token_ids if token not in stops]
            if text == [BOS]:
                scores.append(score_texts(model, WEIGHTS, [text]).item())  # nothing but a BOS: no token to ask for
                continue
            nice, rude = oracle.reward(model, text[:-1], text[-1]).tolist()
            scores.append(4 * nice - 6 * rude)
        best = drawn[group + scores.index(max(scores))]
        expected.append(replace(best, drawn_nll=best.drawn_nll - (math.log(3) - 2 / 3)))
    actual = best_of_n(lm, TOKENIZER, PROMPTS, model, WEIGHTS, n=3, samples=2, **options)
    assert actual == expected
    assert {g.finish_reason for g in drawn} == {"stop", "length"}


def test_seeds_and_batches_follow_the_rules_of_generate(lm_folders: dict[str, Path]) -> None:
    lm, model = make_lm("gpt2").double(), make_reward("q", lm_folders["gpt2"])

    def best(prompts: list[str], n: int, **options: Any) -> list[Generation]:
        return [rounded(g) for g in best_of_n(lm, TOKENIZER, prompts, model, WEIGHTS, n, **options)]

    two = best(PROMPTS, 4, samples=2)
    assert best(PROMPTS, 4, samples=2, batch_size=3) == two
    assert best(PROMPTS[:1], 4) == two[:1]
    assert best(PROMPTS, 4, samples=2, seed=1) != two
    assert best(PROMPTS, 1) == [rounded(g) for g in generate(lm, TOKENIZER, PROMPTS)]


def rounded(generation: Generation) -> Generation:
    """The last digits of a sum depend on the batch it was computed in."""
    return replace(generation, nll=round(generation.nll, 9), drawn_nll=round(generation.drawn_nll, 9))


@pytest.mark.slow
def test_no_more_than_a_batch_is_drawn_or_scored_at_once(lm_folders: dict[str, Path]) -> None:
    lm, model = make_lm("gpt2").double(), make_reward("v", lm_folders["gpt2"])
    rows: list[int] = []
    for module in (lm, model.backbone):
        module.register_forward_pre_hook(lambda _, __, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    best_of_n(lm, TOKENIZER, PROMPTS, model, WEIGHTS, n=10, samples=2, batch_size=4)
    assert max(rows) == 4


def test_more_choice_has_more_reward(lm_folders: dict[str, Path]) -> None:
    lm, model = make_lm("gpt2").double(), make_reward("v", lm_folders["gpt2"])

    def mean(n: int) -> float:
        best = best_of_n(lm, TOKENIZER, PROMPTS, model, WEIGHTS, n, stop_token_ids=[])
        prompts = [[int(word) for word in g.prompt.split()] or [BOS] for g in best]
        texts = [prompt + g.token_ids for prompt, g in zip(prompts, best, strict=True)]
        return score_texts(model, WEIGHTS, texts).mean().item()

    assert mean(1) <= mean(4) <= mean(16)
    assert mean(1) < mean(16)


def test_mistakes_are_named(toy: Path, lm_folders: dict[str, Path]) -> None:
    lm, model = make_lm("gpt2").double(), make_reward("q", lm_folders["gpt2"])
    with pytest.raises(OptionError, match="n must be at least 1, got 0"):
        best_of_n(lm, TOKENIZER, PROMPTS, model, WEIGHTS, 0)
    with pytest.raises(UnknownAttributeError, match="'toxicity'"):
        best_of_n(lm, TOKENIZER, PROMPTS, model, {"toxicity": 1.0}, 2)
    with pytest.raises(ContextLengthError, match="64 tokens and the 1 before them"):
        best_of_n(lm, TOKENIZER, ["5 " * 60], model, WEIGHTS, 2, max_new_tokens=4)
    with pytest.raises(VocabularyError):
        best_of_n(lm, TOKENIZER, PROMPTS, RadQ.from_backbone(toy, attributes=["nice"]), {"nice": 1.0}, 2)
