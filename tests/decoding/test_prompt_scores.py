"""Log-probabilities of prompts against brute force, prefix by prefix, in float64."""

from pathlib import Path

import oracle
import pytest
import torch
from families import EOS, VOCAB, make_lm, make_readout, make_reward

from radq.decoding import prompt_scores
from radq.decoding.config import Steering
from radq.decoding.prompt_scores import PromptScores
from radq.guides.reward import RewardGuide

WEIGHTS = {"nice": 4.0, "rude": -6.0}
PROMPTS = [[5, 9, 3, 12, 30, 7], [11], [6, 6, 31, 14, 3, 8, 20, EOS, 21], [9, 4]]


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize("top", [0, 3, VOCAB])
def test_the_base_models_are_those_of_one_forward(family: str, top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "PART", 4)
    lm = make_lm(family).double()
    scores = PromptScores(lm, None, PROMPTS, Steering(), (), top=top)
    parts = 0
    while not scores.go_on(1):
        parts += 1
    assert parts == sum(-(-(len(prompt) - 1) // 4) for prompt in PROMPTS)
    assert scores.guided == []
    for prompt, found in zip(PROMPTS, scores.base, strict=True):
        assert found[0] is None
        log_p = lm(input_ids=torch.tensor([prompt])).logits[0].detach().log_softmax(-1)
        for place, score in enumerate(found[1:]):
            assert score is not None
            assert score.log_probability == pytest.approx(float(log_p[place, prompt[place + 1]]), abs=1e-9)
            ranked = log_p[place].topk(top)
            assert [token for token, _ in score.best] == ranked.indices.tolist()
            assert [number for _, number in score.best] == pytest.approx(ranked.values.tolist(), abs=1e-9)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["q", "v", "readout"])
@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature", "stops"),
    [(VOCAB, None, 1.0, []), (6, None, 0.7, []), (12, 0.8, 1.3, []), (VOCAB, None, 1.0, [EOS, 3])],
)
def test_the_guided_ones_are_those_of_the_formulas(
    family: str,
    kind: str,
    top_k: int,
    top_p: float | None,
    temperature: float,
    stops: list[int],
    lm_folders: dict[str, Path],
) -> None:
    """Most tokens are no candidates of narrow settings; the texts go on after them all the same."""
    lm = make_lm(family).double()
    folder = lm_folders[family]
    model = make_readout("q", folder).double() if kind == "readout" else make_reward(kind, folder).double()
    guide, steering = RewardGuide(model, WEIGHTS), Steering(top_k, top_p, temperature, kl_budget=None)
    scores = PromptScores(lm, guide, PROMPTS, steering, guide.beta, stops)
    assert scores.go_on(10_000)
    outside = 0
    for prompt, found in zip(PROMPTS, scores.guided, strict=True):
        assert (found[0], len(found)) == (None, len(prompt))
        for place in range(1, len(prompt)):
            prefix = prompt[:place]
            logits = oracle.guided_logits(lm, model, WEIGHTS, prefix, top_k, top_p, temperature, stops=stops)
            expected = float(logits.detach().log_softmax(-1)[prompt[place]])
            assert found[place] == pytest.approx(expected, abs=2e-5)
            outside += expected == -torch.inf
    assert (outside > 0) is (top_k < VOCAB)
