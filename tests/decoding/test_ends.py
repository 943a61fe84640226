"""A guide decides what is said, not when it ends: stop tokens keep the probability that the base model gives them."""

import math
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from baselines import make_guide
from families import EOS, VOCAB, make_lm, make_number_tokenizer, make_reward
from hypothesis import given, settings
from hypothesis import strategies as st
from proposals import ConstantGuide, NoState
from torch import Tensor

from radq.decoding.config import Steering
from radq.decoding.generate import stream
from radq.decoding.steering import RowSettings, propose
from radq.guides.base import Guide
from radq.guides.gedi import filter_candidates
from radq.guides.reward import RewardGuide
from radq.hosts.transformers import GuidedLogitsProcessor

TOKENIZER = make_number_tokenizer()
PROMPTS = ["5 9 3 12 30", "11"]
STOPS = [EOS, 5, 9, 20]

STEERINGS = st.builds(
    Steering,
    top_k=st.one_of(st.none(), st.integers(1, VOCAB)),
    top_p=st.one_of(st.none(), st.floats(0.05, 1.0)),
    temperature=st.one_of(st.just(0.0), st.floats(0.2, 3.0)),
    kl_budget=st.one_of(st.none(), st.floats(0.001, 2)),
)
ROWS = st.lists(st.tuples(STEERINGS, st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB)), min_size=1, max_size=4)


def spread(candidates: Tensor, logits: Tensor) -> Tensor:
    """The probabilities of all tokens, from the logits of the candidates of one row."""
    return torch.zeros(VOCAB, dtype=torch.float64).scatter(0, candidates, logits.double().softmax(-1))


@settings(max_examples=100, deadline=None)
@given(ROWS, st.integers(0, 99), st.floats(0, 60))
def test_every_stop_token_keeps_its_probability(rows: list[tuple[Steering, set[int]]], seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(rows), VOCAB, generator=generator)
    guide = ConstantGuide(size * torch.randn(VOCAB, generator=generator))
    steerings, stops = [steering for steering, _ in rows], [own for _, own in rows]
    strengths = RowSettings.stack(steerings, [()] * len(rows), VOCAB, "cpu", stops=stops)
    found = propose(logits, guide, NoState(), strengths)
    free = propose(logits, guide, NoState(), RowSettings.stack(steerings, [()] * len(rows), VOCAB, "cpu"))
    for row, (steering, own) in enumerate(rows):
        base = spread(found.candidates[row], found.base[row])
        guided = spread(found.candidates[row], found.logits[row])
        ends = sorted(own)
        words = sorted(set(range(VOCAB)) - own)
        torch.testing.assert_close(guided[ends], base[ends], atol=1e-5, rtol=1e-4)
        if steering.kl_budget is not None:
            assert found.kl[row] <= steering.kl_budget * 1.001 + 1e-5
        elif base[words].sum() > 1e-6:  # words stand to each other as they do where stop tokens are rewarded, too
            wanted = spread(free.candidates[row], free.logits[row])[words]
            if wanted.sum() > 1e-6:
                share = guided[words] / guided[words].sum()
                torch.testing.assert_close(share, wanted / wanted.sum(), atol=1e-4, rtol=1e-3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 99), st.floats(0.01, 1))
def test_a_budget_is_used_up_where_words_alone_are_shifted(seed: int, budget: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, shift = torch.randn(1, VOCAB, generator=generator), 90 * torch.randn(VOCAB, generator=generator)
    strengths = RowSettings.stack([Steering(None, kl_budget=budget)], [()], VOCAB, "cpu", stops=[STOPS])
    assert propose(logits, ConstantGuide(shift), NoState(), strengths).kl.item() == pytest.approx(budget, rel=1e-3)


def test_the_shift_of_a_stop_token_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    strengths = RowSettings.stack([Steering(None, kl_budget=None)], [()], 3, "cpu", stops=[[0]])
    shift = torch.tensor([-40.0, math.log(2), math.log(4)])
    found = propose(logits, ConstantGuide(shift), NoState(), strengths)
    assert found.logits.softmax(-1).tolist() == [pytest.approx([0.5, 1 / 6, 1 / 3])]
    assert found.shift[0, 0].item() == pytest.approx(math.log(3))  # the mean of 2 and 4


def test_a_guide_that_allows_only_ends_forbids_no_word() -> None:
    strengths = RowSettings.stack([Steering(None, kl_budget=None)], [()], 3, "cpu", stops=[[0]])
    guide = ConstantGuide(torch.tensor([0.0, 1.0, 1.0]), allowed=[True, False, False])
    found = propose(torch.zeros(1, 3), guide, NoState(), strengths)
    assert found.logits.softmax(-1).tolist() == [pytest.approx([1 / 3, 1 / 3, 1 / 3])]


def test_forbidden_words_leave_their_share_to_the_others() -> None:
    strengths = RowSettings.stack([Steering(None, kl_budget=None)], [()], 3, "cpu", stops=[[0]])
    guide = ConstantGuide(torch.tensor([-9.0, 1.0, 1.0]), allowed=[False, True, False])
    found = propose(torch.zeros(1, 3), guide, NoState(), strengths)
    assert found.logits.softmax(-1).tolist() == [pytest.approx([1 / 3, 2 / 3, 0])]


def test_a_filter_counts_words_alone() -> None:
    """Else an end that the guide likes, though never sure, would turn the filter of words off."""
    logits = torch.tensor([[0.5, 0.125, 0.125, 0.125, 0.125]]).log()
    posterior = torch.tensor([[0.7, 0.6, 0.5, 0.1, 0.05]]).log()
    guide: Any = ConstantGuide(torch.zeros(5))
    guide.allowed = lambda logits: filter_candidates(posterior, logits, 0.8, 0.8)
    strengths = RowSettings.stack([Steering(None, kl_budget=None)], [()], 5, "cpu", stops=[[0]])
    found = propose(logits, guide, NoState(), strengths)
    assert found.logits.softmax(-1).tolist() == [pytest.approx([0.5, 0.5, 0, 0, 0])]


def test_where_all_candidates_are_ends_they_stay_as_they_are() -> None:
    strengths = RowSettings.stack([Steering(2, kl_budget=0.1)], [()], 3, "cpu", stops=[[0, 1]])
    found = propose(
        torch.tensor([[2.0, 1.0, 0.0]]), ConstantGuide(torch.tensor([5.0, -5.0, 1.0])), NoState(), strengths
    )
    assert found.shift.tolist() == [[0.0, 0.0]]
    assert found.kl.tolist() == [0.0]


def test_a_model_that_was_taught_ends_decides_about_them() -> None:
    steering = Steering(None, ends="taught", kl_budget=None)
    strengths = RowSettings.stack([steering], [()], 3, "cpu", stops=[[0]])
    found = propose(torch.zeros(1, 3), ConstantGuide(torch.tensor([-9.0, 1.0, 2.0])), NoState(), strengths)
    assert found.shift.tolist() == [[-9.0, 1.0, 2.0]]


def make_guides(lm_folders: dict[str, Path]) -> dict[str, Guide]:
    kinds = {kind: RewardGuide(make_reward(kind, lm_folders["gpt2"]), {"nice": 30.0}) for kind in ("q", "v")}
    experts: dict[str, Guide] = {
        "dexperts": make_guide("dexperts", "gpt2", 3.0),
        "gedi": make_guide("gedi", "gpt2", 20.0, filter_p=0.6, target_p=0.7),
    }
    return {**kinds, **experts, "sum": kinds["q"] + experts["gedi"]}


@pytest.mark.parametrize("name", ["q", "v", "dexperts", "gedi", "sum"])
def test_no_kind_of_guide_changes_when_texts_end(name: str, lm_folders: dict[str, Path]) -> None:
    """In the engine, where rows have room for the stop tokens of others, which join and leave."""
    lm, guide = make_lm("gpt2").double(), make_guides(lm_folders)[name]
    shifted = False
    for step in stream(
        lm, TOKENIZER, PROMPTS, guide, Steering(None, kl_budget=None), 4, 3, stop_token_ids=STOPS, batch_size=2
    ):
        for row in range(len(step.rows)):
            proposal = step.proposal
            base = spread(proposal.candidates[row], proposal.base[row])[STOPS]
            guided = spread(proposal.candidates[row], proposal.logits[row])[STOPS]
            torch.testing.assert_close(guided, base, atol=1e-6, rtol=1e-5)
            shifted = shifted or float(proposal.kl[row]) > 0.01
    assert shifted


@pytest.mark.parametrize("known_by", ["stop_token_ids", "tokenizer", "lm", "the guide"])
def test_the_processor_of_transformers_knows_ends(known_by: str, lm_folders: dict[str, Path]) -> None:
    lm, model = make_lm("gpt2").double(), make_reward("q", lm_folders["gpt2"])
    ways: dict[str, dict[str, Any]] = {
        "stop_token_ids": {"stop_token_ids": [EOS]},
        "tokenizer": {"tokenizer": TOKENIZER},
        "lm": {"lm": lm},
    }
    processor = GuidedLogitsProcessor(RewardGuide(model, {"nice": 30.0}), top_k=None, **ways.get(known_by, {}))
    scores = oracle.base_logits(lm, [5, 7])[None]
    held = processor(torch.tensor([[5, 7]]), scores).softmax(-1)[0, EOS]
    assert held.item() == pytest.approx(scores.softmax(-1)[0, EOS].item(), rel=1e-4)
    processor.steering = Steering(None, ends="taught", kl_budget=None)
    free = processor(torch.tensor([[5, 7]]), scores).softmax(-1)[0, EOS]
    assert abs(free - held) > 1e-3
