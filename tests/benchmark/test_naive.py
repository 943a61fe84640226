"""The naive guides give the texts of radq's own guides, so that only their times differ."""

import pytest
import torch
from tiny_shape import TINY
from transformers import AutoConfig

from radq.benchmark.guides import (
    BenchModels,
    SeparateForwards,
    WholeVocabulary,
    make_number_tokenizer,
    make_random_lm,
)
from radq.decoding.generate import Generation, generate
from radq.guides.base import Guide
from radq.guides.meter import Meter
from radq.guides.reward import RewardGuide

K = 5
PROMPTS = [[5, 9, 7], [30]]


@pytest.fixture(scope="module")
def models() -> BenchModels:
    torch.manual_seed(0)
    lm, backbone = (AutoConfig.for_model(TINY.family, **TINY.shared, **own) for own in (TINY.lm, TINY.reward))
    tokenizer = make_number_tokenizer(TINY.vocab_size)
    return BenchModels(make_random_lm(lm, "cpu", torch.float32), tokenizer, backbone, None)


def make_guide(models: BenchModels, kind: str) -> RewardGuide:
    """A guide whose rewards are far enough apart to change texts."""
    model = models.rad_q if kind == "q" else models.rad_v
    torch.manual_seed(1)
    torch.nn.init.normal_(model.head.weight, std=0.5 if kind == "v" else 2.0)
    return RewardGuide(model, {"reward": 20.0})


def decode(models: BenchModels, guide: Guide | None, top_k: int | None) -> list[Generation]:
    return generate(models.lm, models.tokenizer, PROMPTS, guide, top_k, max_new_tokens=6, stop_token_ids=[])


@pytest.mark.parametrize("top_k", [K, None])
@pytest.mark.parametrize(("kind", "naive"), [("q", WholeVocabulary), ("v", SeparateForwards)])
def test_naive_guides_give_the_same_texts(
    models: BenchModels, kind: str, naive: type[Guide], top_k: int | None
) -> None:
    guide = make_guide(models, kind)
    own, other = decode(models, guide, top_k), decode(models, naive(guide), top_k)  # pyright: ignore
    assert [one.token_ids for one in own] == [one.token_ids for one in other]
    assert [one.token_ids for one in own] != [one.token_ids for one in decode(models, None, top_k)]
    for one, two in zip(own, other, strict=True):
        assert two.shifts == pytest.approx(one.shifts, abs=1e-3)


def test_separate_forwards_are_a_forward_for_each_candidate_and_one_more(models: BenchModels) -> None:
    guide = make_guide(models, "v")
    with Meter(guide) as own:
        decode(models, own, K)
    with Meter(SeparateForwards(guide)) as naive:
        decode(models, naive, K)
    assert own.continuations.calls == 6  # one for each step
    assert naive.continuations.calls == 6 * K + 5  # the last token is not read
