"""What guides cost: the paper's table comes out, and rows, prompts and padding count as they should."""

from pathlib import Path

import pytest
import torch
from baselines import make_guide
from families import VOCAB, make_lm, make_number_tokenizer, make_reward

from radq.decoding.generate import generate
from radq.guides.base import Guide
from radq.guides.meter import Meter
from radq.guides.reward import RewardGuide

TOKENIZER = make_number_tokenizer()
K = 7
PROMPTS = torch.tensor([[5, 9, 3], [0, 7, 30]])
MASK = torch.tensor([[1, 1, 1], [0, 1, 1]])


def make(method: str, lm_folders: dict[str, Path]) -> Guide:
    if method in ("q", "v"):
        return RewardGuide(make_reward(method, lm_folders["gpt2"]), {"nice": 1.0})
    return make_guide(method)


@pytest.mark.parametrize(
    ("method", "calls", "tokens", "prompt_calls", "prompt_tokens"),
    [
        ("q", 1, 1, 1, 5 + 2),  # two texts of 3 and 2 tokens, each with a BOS
        ("v", 1, K, 1, 5 + 2),
        ("dexperts", 2, 2, 2, 2 * (5 + 2)),
        ("gedi", 1, 2, 1, 2 * (5 + 2) + 2 * (2 + 1)),  # and with the codes of two classes
    ],
)
def test_a_step_costs_what_the_paper_says(
    method: str, calls: int, tokens: int, prompt_calls: int, prompt_tokens: int, lm_folders: dict[str, Path]
) -> None:
    candidates = torch.arange(K).expand(2, -1)
    with Meter(make(method, lm_folders)) as meter:
        state = meter.start(PROMPTS, MASK)
        for token in range(4):
            state = meter.advance(meter.advise(state, candidates).state, torch.tensor([token, 3]))
    assert (meter.steps, meter.tokens) == (4, 8)
    assert (meter.calls_per_step, meter.tokens_per_token) == (calls, tokens)
    assert (meter.prompts.calls, int(meter.prompts.tokens)) == (prompt_calls, prompt_tokens)
    meter.advance(state, torch.tensor([4, 4]))
    assert meter.continuations.calls == 4 * calls  # nothing counts any more


@pytest.mark.parametrize("method", ["q", "v", "dexperts", "gedi"])
def test_decoding_under_a_meter_is_the_same(method: str, lm_folders: dict[str, Path]) -> None:
    lm, guide = make_lm("gpt2").double(), make(method, lm_folders)
    prompts = ["5 9 3", "7 30 8 8", "11"]
    options = {"top_k": K, "samples": 4, "max_new_tokens": 8, "stop_token_ids": [3, 5, 9, 12, 30]}
    plain = generate(lm, TOKENIZER, prompts, guide, **options)
    with Meter(guide) as meter:
        assert generate(lm, TOKENIZER, prompts, meter, **options) == plain
    generated = sum(len(g.token_ids) for g in plain)
    assert meter.tokens == generated
    last = len(plain)  # of each text the last token is chosen, not read
    per_token = {"q": 1, "v": K, "dexperts": 2, "gedi": 2}[method]
    read = generated if method == "v" else generated - last
    assert int(meter.continuations.tokens) == per_token * read
    assert meter.prompts.calls == (2 if method == "dexperts" else 1)


def test_an_expert_of_two_guides_is_counted_once(lm_folders: dict[str, Path]) -> None:
    model = make_reward("q", lm_folders["gpt2"])
    total = RewardGuide(model, {"nice": 1.0}) + RewardGuide(model, {"rude": 1.0})
    with Meter(total) as meter:
        state = meter.start(PROMPTS, MASK)
        state = meter.advise(state, torch.arange(VOCAB).expand(2, -1)).state
        meter.advance(state, torch.tensor([4, 4]))
    assert meter.prompts.calls == 2  # each guide reads for itself
    assert meter.continuations.calls == 2
