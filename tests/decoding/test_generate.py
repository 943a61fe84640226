"""Guided decoding: every step equals brute force; seeds, batches, budgets and stops behave."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from families import BOS, EOS, VOCAB, make_lm, make_number_tokenizer, make_reward
from hypothesis import example, given, settings
from hypothesis import strategies as st
from proposals import ConstantGuide, NoState, propose_all
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq.decoding.config import DEFAULT_KL_BUDGET
from radq.decoding.generate import generate, stream
from radq.decoding.steering import (
    Plan,
    RowSettings,
    Steering,
    choose,
    choose_candidates,
    kl_divergence,
    kl_scale,
    propose,
    sample,
)
from radq.decoding.text import encode_prompts
from radq.errors import ContextLengthError, OptionError, RewardValueError, VocabularyError
from radq.evaluation.perplexity import measure_likelihoods
from radq.guides.reward import RewardGuide
from radq.models.kinds import RadQ
from radq.models.reward import RewardModel

TOKENIZER = make_number_tokenizer()
WEIGHTS = {"nice": 4.0, "rude": -6.0}
PROMPTS = ["5 9 3 12 30", "11", "6 6 31 14 3 8 20 21", ""]


def make(family: str, kind: str, lm_folders: dict[str, Path]) -> tuple[PreTrainedModel, RewardModel]:
    return make_lm(family).double(), make_reward(kind, lm_folders[family])


@pytest.fixture(scope="module")
def unchanged(lm_folders: dict[str, Path]) -> Callable[[str, str], tuple[PreTrainedModel, RewardModel]]:
    """Base and reward model of a family and kind, made once for all tests that do not change them."""
    return functools.cache(lambda family, kind: make(family, kind, lm_folders))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3"])
@pytest.mark.parametrize("kind", ["q", "v"])
@pytest.mark.parametrize("clamp", [True, False])
@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"),
    [(1, None, 1.0), (5, None, 1.0), (VOCAB, None, 1.0), (None, None, 0.7), (5, 0.6, 1.0), (None, 0.8, 1.3)],
)
def test_every_step_equals_brute_force(
    family: str,
    kind: str,
    clamp: bool,
    top_k: int | None,
    top_p: float | None,
    temperature: float,
    unchanged: Callable[[str, str], tuple[PreTrainedModel, RewardModel]],
) -> None:
    """Left-padded batch, two samples of each prompt, two attributes."""
    lm, model = unchanged(family, kind)
    guide = RewardGuide(model, WEIGHTS, clamp)
    texts = [[int(word) for word in prompt.split()] or [BOS] for prompt in PROMPTS for _ in range(2)]
    steering = Steering(top_k, top_p, temperature, kl_budget=None)
    count = 0
    for step in stream(lm, TOKENIZER, PROMPTS, guide, steering, 4, 2, seed=3, stop_token_ids=[EOS]):
        proposal = step.proposal
        for i, row in enumerate(step.rows.tolist()):
            expected = oracle.guided_logits(lm, model, WEIGHTS, texts[row], top_k, top_p, temperature, clamp)
            actual = torch.full_like(expected, -torch.inf)
            possible = ~proposal.base[i].isneginf()
            actual[proposal.candidates[i][possible]] = proposal.logits[i][possible].double()
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
            texts[row].append(int(step.tokens[i]))
            count += 1
    assert count >= 16


@settings(max_examples=20, deadline=None)
@given(st.integers(1, VOCAB), st.one_of(st.none(), st.floats(0.05, 1.0)), st.integers(0, 99))
def test_candidates_are_the_smallest_likely_set(top_k: int, top_p: float | None, seed: int) -> None:
    logits = 3 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed))
    strengths = RowSettings.repeat(Steering(top_k, top_p), None, logits)
    candidates, values = choose_candidates(logits, strengths)
    for row in range(4):
        kept = candidates[row][~values[row].isneginf()].tolist()
        assert sorted(kept) == sorted(oracle.candidates(logits[row].double(), top_k, top_p))
        torch.testing.assert_close(values[row][~values[row].isneginf()], logits[row][kept])


STEERINGS = st.builds(
    Steering,
    top_k=st.one_of(st.none(), st.integers(1, VOCAB)),
    top_p=st.one_of(st.none(), st.floats(0.05, 1.0)),
    temperature=st.one_of(st.just(0.0), st.floats(1e-9, 3.0)),
    kl_budget=st.one_of(st.none(), st.floats(0, 2)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(STEERINGS, min_size=2, max_size=4), st.integers(0, 99))
@example([Steering(top_k=1), Steering(top_k=VOCAB)], 17)  # all tokens, by their number
def test_rows_with_numbers_of_their_own_are_steered_as_alone(steerings: list[Steering], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(steerings), VOCAB, generator=generator)
    uniforms = torch.rand(len(steerings), generator=generator, dtype=torch.float64)
    guide = ConstantGuide(torch.randn(VOCAB, generator=generator))
    strengths = RowSettings.stack(steerings, [()] * len(steerings), VOCAB, "cpu")
    together = propose(logits, guide, NoState(), strengths)
    chosen = choose(together, strengths, uniforms)
    for row, steering in enumerate(steerings):
        own = strengths.map(lambda values, row=row: values[row : row + 1], Plan.of([steering]))
        alone = propose(logits[row : row + 1], guide, NoState(), own)
        expected = torch.full((VOCAB,), -torch.inf).scatter(0, alone.candidates[0], alone.logits[0])
        found = torch.full((VOCAB,), -torch.inf).scatter(0, together.candidates[row], together.logits[row])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(together.kl[row], alone.kl[0], atol=1e-4, rtol=1e-4)
        choice = choose(alone, own, uniforms[row : row + 1])
        assert together.candidates[row, chosen[row]] == alone.candidates[0, choice[0]]


def test_excluded_tokens_are_never_revived(lm_folders: dict[str, Path]) -> None:
    lm, model = make("gpt2", "q", lm_folders)
    guide = RewardGuide(model, {"nice": 1000.0}, clamp=False)
    logits = torch.zeros(1, VOCAB)
    logits[0, ::2] = -torch.inf
    proposal = propose_all(logits, guide, guide.start(torch.tensor([[5]])), Steering(top_k=None, kl_budget=None))
    assert proposal.logits[0, ::2].isneginf().all()
    assert proposal.logits[0, 1::2].isfinite().all()


# --- invariants ---


def test_temperature_divides_the_base_alone() -> None:
    guide = ConstantGuide(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    logits = torch.tensor([[4.0, 2.0, 0.0, -2.0]])
    proposal = propose_all(logits, guide, None, Steering(top_k=None, temperature=2.0, kl_budget=None))
    assert proposal.logits.tolist() == [[2.0, 2.0, 2.0, 2.0]]


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 3, exclude_min=True), st.integers(0, 99))
def test_no_temperature_is_too_low(temperature: float, seed: int) -> None:
    """The colder, the more of the base's best candidate; numbers stay numbers."""
    generator = torch.Generator().manual_seed(seed)
    logits, guide = 40 * torch.randn(3, 9, generator=generator), ConstantGuide(torch.randn(9, generator=generator))
    proposal = propose_all(logits, guide, None, Steering(5, temperature=temperature, kl_budget=0.5))
    assert proposal.kl.isfinite().all()
    probabilities = proposal.logits.softmax(-1)
    assert probabilities.isfinite().all()
    if temperature < 1e-4:
        assert probabilities.argmax(-1).tolist() == [0, 0, 0]
        assert (probabilities[:, 0] > 0.999).all()


def test_a_temperature_that_float32_cannot_divide_by(lm_folders: dict[str, Path]) -> None:
    lm, model = make("gpt2", "q", lm_folders)
    cold = generate(lm.float(), TOKENIZER, PROMPTS, RewardGuide(model, WEIGHTS), temperature=1e-39)
    greedy = generate(lm, TOKENIZER, PROMPTS, temperature=0)
    assert [g.token_ids for g in cold] == [g.token_ids for g in greedy]
    assert all(g.kl == 0 for g in cold)


@settings(max_examples=30, deadline=None)
@given(st.floats(-50, 50), st.integers(0, 99))
def test_a_constant_added_to_all_rewards_changes_nothing(constant: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, shift = torch.randn(2, 9, generator=generator), torch.randn(9, generator=generator)
    one, two = (
        propose_all(logits, ConstantGuide(s), None, Steering(5, kl_budget=None)) for s in (shift, shift + constant)
    )
    torch.testing.assert_close(one.logits.softmax(-1), two.logits.softmax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["q", "v"])
def test_beta_zero_is_the_base(kind: str, lm_folders: dict[str, Path]) -> None:
    lm, model = make("llama", kind, lm_folders)
    plain = generate(lm, TOKENIZER, PROMPTS, samples=3, max_new_tokens=6)
    guided = generate(lm, TOKENIZER, PROMPTS, RewardGuide(model, {"nice": 0.0}), samples=3, max_new_tokens=6)
    assert [g.token_ids for g in plain] == [g.token_ids for g in guided]
    assert all(g.kl == 0 for g in guided)


def test_the_strengths_of_a_call_take_the_place_of_the_guides_own(lm_folders: dict[str, Path]) -> None:
    lm, model = make("llama", "q", lm_folders)
    weak = RewardGuide(model, {"nice": 1.0, "rude": 1.0})
    options: dict[str, Any] = {"samples": 3, "max_new_tokens": 6}
    wanted = generate(lm, TOKENIZER, PROMPTS, RewardGuide(model, WEIGHTS), **options)
    assert generate(lm, TOKENIZER, PROMPTS, weak, beta=list(WEIGHTS.values()), **options) == wanted
    assert generate(lm, TOKENIZER, PROMPTS, weak, **options) != wanted
    for beta in ([1.0], [1.0, float("nan")]):
        with pytest.raises(OptionError, match="but the guide takes 2"):
            generate(lm, TOKENIZER, PROMPTS, weak, beta=beta)


@pytest.mark.parametrize("kind", ["q", "v"])
def test_texts_do_not_depend_on_the_batch(kind: str, lm_folders: dict[str, Path]) -> None:
    lm, model = make("gpt2", kind, lm_folders)
    guide = RewardGuide(model, WEIGHTS)
    options: dict[str, Any] = {"samples": 2, "max_new_tokens": 6, "seed": 7}
    together = [g.token_ids for g in generate(lm, TOKENIZER, PROMPTS, guide, **options)]
    in_twos = [g.token_ids for g in generate(lm, TOKENIZER, PROMPTS, guide, **options, batch_size=2)]
    assert together == in_twos
    alone = [g.token_ids for g in generate(lm, TOKENIZER, PROMPTS[:1], guide, **options)]
    assert together[:2] == alone
    longer = generate(lm, TOKENIZER, PROMPTS, guide, **(options | {"max_new_tokens": 9}))
    assert [g.token_ids[:6] for g in longer] == together
    more = generate(lm, TOKENIZER, PROMPTS, guide, **(options | {"samples": 5}))
    assert [g.token_ids for i, g in enumerate(more) if i % 5 < 2] == together


@pytest.mark.parametrize("kind", ["q", "v", None])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
def test_batch_size_is_a_limit_also_for_the_samples_of_one_prompt(
    batch_size: int, kind: str | None, lm_folders: dict[str, Path]
) -> None:
    lm, model = make("gpt2", kind or "q", lm_folders)
    guide = RewardGuide(model, WEIGHTS) if kind else None
    options: dict[str, Any] = {"samples": 7, "max_new_tokens": 4, "seed": 2, "stop_token_ids": [3, 5, 9]}
    whole = generate(lm, TOKENIZER, PROMPTS, guide, **options)
    rows: list[int] = []
    lm.register_forward_pre_hook(lambda _, __, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    parts = generate(lm, TOKENIZER, PROMPTS, guide, **options, batch_size=batch_size)
    assert [g.token_ids for g in parts] == [g.token_ids for g in whole]
    assert [g.prompt for g in parts] == [prompt for prompt in PROMPTS for _ in range(7)]
    assert max(rows) == batch_size


def test_same_seed_same_text_other_seed_other_text(lm_folders: dict[str, Path]) -> None:
    lm, model = make("gpt2", "q", lm_folders)
    one, two, other = (
        [g.token_ids for g in generate(lm, TOKENIZER, PROMPTS, RewardGuide(model, WEIGHTS), seed=seed)]
        for seed in (0, 0, 1)
    )
    assert one == two != other


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.0, 2.0, -torch.inf, 1.0])
    uniforms = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    drawn = sample(logits.double().softmax(0).expand(20000, -1), uniforms).bincount(minlength=5) / 20000
    torch.testing.assert_close(drawn.float(), logits.softmax(0), atol=1e-3, rtol=0)
    assert drawn[3] == 0
    certain = torch.tensor([[0.0, 1.0, 0.0]] * 2, dtype=torch.float64)
    ends = sample(certain, torch.tensor([0.0, 1 - 1e-16], dtype=torch.float64))
    assert ends.tolist() == [1, 1]


# --- KL budget ---


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-4, 3), st.floats(-1, 6), st.integers(0, 99), st.sampled_from([8, 300, 5000]))
def test_the_kl_budget_is_used_up_but_not_passed(budget: float, digits: float, seed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(3, k, generator=generator, dtype=torch.float64)
    base[0, 5:] = -torch.inf
    shift = 10**digits * torch.randn(3, k, generator=generator, dtype=torch.float64)
    scale = kl_scale(base, shift, torch.full((3,), budget, dtype=torch.float64))
    kl = kl_divergence(base + scale[:, None] * shift, base)
    assert (kl <= budget + 1e-9).all()
    full = kl_divergence(base + shift, base) <= budget
    assert (scale[full] == 1).all()
    torch.testing.assert_close(kl[~full], torch.full_like(kl[~full], budget), rtol=1e-4, atol=1e-6)


def test_the_kl_budget_at_its_limits() -> None:
    """Neither an endless budget nor a guide without a wish is a reason to steer less, and no shift is too large."""
    base, ones = torch.randn(3, 4, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    wish = torch.tensor([1.0, 2.0, -3.0, 0.5], dtype=torch.float64).expand(3, 4)
    assert kl_scale(base, wish, torch.inf * ones).tolist() == [1, 1, 1]
    assert kl_scale(base, 0 * wish, 0.1 * ones).tolist() == [1, 1, 1]
    assert kl_scale(base, 1e30 * wish, 0.1 * ones).tolist() == [0, 0, 0]
    forbidden = torch.tensor([0.0, 0.0, 0.0, -torch.inf], dtype=torch.float64).expand(3, 4)
    scale = kl_scale(base, wish, 3.0 * ones, forbidden)
    kl = kl_divergence(base + scale[:, None] * wish + forbidden, base)
    assert ((kl <= 3 + 1e-9) & ((scale == 1) | (kl > 3 - 1e-4))).all()


def test_kl_by_hand() -> None:
    base, guided = torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([[0.75, 0.25, 0.0]]).log()
    expected = 0.75 * torch.tensor(1.5).log() + 0.25 * torch.tensor(0.5).log()
    torch.testing.assert_close(kl_divergence(guided, base)[0], expected)


def test_generations_report_the_divergence_they_used(lm_folders: dict[str, Path]) -> None:
    lm, model = make("gpt2", "q", lm_folders)
    guide = RewardGuide(model, {"nice": 100.0}, clamp=False)
    free = generate(lm, TOKENIZER, PROMPTS, guide, max_new_tokens=5, kl_budget=None)
    tied = generate(lm, TOKENIZER, PROMPTS, guide, max_new_tokens=5, kl_budget=0.1)
    usual = generate(lm, TOKENIZER, PROMPTS, guide, max_new_tokens=5)
    for limit, found in ((0.1, tied), (DEFAULT_KL_BUDGET, usual)):
        assert all(g.kl <= limit + 1e-4 and g.kl_budget == limit for g in found)
    assert max(g.kl for g in free) > DEFAULT_KL_BUDGET
    assert {g.kl_budget for g in free} == {None}
    none = generate(lm, TOKENIZER, PROMPTS, guide, max_new_tokens=5, kl_budget=0.0)
    plain = generate(lm, TOKENIZER, PROMPTS, max_new_tokens=5)
    assert [g.token_ids for g in none] == [g.token_ids for g in plain]


# --- results ---


@pytest.mark.parametrize("kind", ["q", "v"])
def test_results_come_in_prompt_order_and_end_at_stop_tokens(kind: str, lm_folders: dict[str, Path]) -> None:
    lm, model = make("gpt2", kind, lm_folders)
    guide = RewardGuide(model, WEIGHTS)
    stops = [3, 5, 9, 12, 30]  # rows leave the batch at different steps
    options: dict[str, Any] = {"max_new_tokens": 8, "samples": 4, "ends": "taught"}
    out = generate(lm, TOKENIZER, PROMPTS, guide, None, stop_token_ids=stops, **options)
    assert [g.prompt for g in out] == [prompt for prompt in PROMPTS for _ in range(4)]
    assert {g.finish_reason for g in out} == {"stop", "length"}
    for g in out:
        assert len(g.token_ids) == len(g.shifts) <= 8
        assert not set(g.token_ids[:-1]) & set(stops)
        assert (g.token_ids[-1] in stops) == (g.finish_reason == "stop")
        assert g.finish_reason == "stop" or len(g.token_ids) == 8
    free = generate(lm, TOKENIZER, PROMPTS, guide, None, stop_token_ids=[], **options)
    assert [f.token_ids[: len(g.token_ids)] for f, g in zip(free, out, strict=True)] == [g.token_ids for g in out]


def test_the_models_end_of_text_stops_by_default(lm_folders: dict[str, Path]) -> None:
    lm, _ = make("gpt2", "q", lm_folders)
    ends = ConstantGuide(torch.eye(VOCAB)[EOS] * 100)
    out = generate(lm, TOKENIZER, ["5"], ends, top_k=None, ends="taught", kl_budget=None)
    assert out[0].token_ids == [EOS]
    assert out[0].finish_reason == "stop"
    assert out[0].text == ""


def test_the_clipped_share_is_reported(lm_folders: dict[str, Path]) -> None:
    lm, model = make("gpt2", "v", lm_folders)
    steering = Steering(top_k=None, top_p=0.7, kl_budget=None)
    for step in stream(lm, TOKENIZER, ["5 6"], RewardGuide(model, WEIGHTS), steering, max_new_tokens=1):
        proposal = step.proposal
    possible = proposal.candidates[0][~proposal.base[0].isneginf()].tolist()
    low, high = model.config.response_range
    rewards = [oracle.reward(model, [5, 6], token) for token in possible]
    outside = [bool(((reward < low) | (reward > high)).any()) for reward in rewards]
    assert proposal.clipped.item() == pytest.approx(sum(outside) / len(outside))
    assert 0 < sum(outside) < len(outside)
    out = generate(lm, TOKENIZER, ["5 6"], RewardGuide(model, WEIGHTS), None, 0.7, max_new_tokens=1)
    assert out[0].clipped == pytest.approx(proposal.clipped.item())


def test_greedy_takes_the_best_guided_candidate(lm_folders: dict[str, Path]) -> None:
    lm, model = make("llama", "q", lm_folders)
    out = generate(lm, TOKENIZER, ["5 9"], RewardGuide(model, WEIGHTS), temperature=0, max_new_tokens=5)
    text = [5, 9]
    for token in out[0].token_ids:
        assert token == int(oracle.guided_logits(lm, model, WEIGHTS, text).argmax())
        text.append(token)


def test_the_base_model_is_left_in_its_mode(lm_folders: dict[str, Path]) -> None:
    lm, model = make("gpt2", "q", lm_folders)
    calm = generate(lm, TOKENIZER, PROMPTS, RewardGuide(model, WEIGHTS), temperature=0)
    lm.train()
    assert generate(lm, TOKENIZER, PROMPTS, RewardGuide(model, WEIGHTS), temperature=0) == calm
    assert lm.training


def test_a_part_of_the_prompts_draws_what_the_whole_list_draws(
    toy_lm: PreTrainedModel, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = ["the film was", "the plot", "this movie", "a story"]
    whole = generate(toy_lm, toy_tokenizer, prompts, samples=2)
    parts = [
        *generate(toy_lm, toy_tokenizer, prompts[:1], samples=2),
        *generate(toy_lm, toy_tokenizer, prompts[1:], samples=2, first_prompt=1),
    ]
    assert [g.text for g in parts] == [g.text for g in whole]


def test_guides_steer_a_real_tokenizer_and_text(
    toy: Path, toy_lm: PreTrainedModel, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    model = RadQ.from_backbone(toy, attributes=["praise"])
    out = generate(toy_lm, toy_tokenizer, ["the film was", ""], RewardGuide(model, {"praise": 5.0}), samples=2)
    assert len(out) == 4
    for g in out:  # prompt and text make the whole, also where the tokenizer drops a space at a beginning
        assert g.prompt + g.text == toy_tokenizer.decode(
            toy_tokenizer(g.prompt).input_ids + g.token_ids, skip_special_tokens=True
        )


def make_llama_tokenizer() -> PreTrainedTokenizerBase:
    """Adds a BOS to every text, as LLaMA's does."""
    tokenizer = make_number_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def test_a_prompt_that_brings_its_bos_gets_no_second_one() -> None:
    lm, tokenizer = make_lm("llama").double(), make_llama_tokenizer()
    prompts = ["5 9", "<s> 5 9", "<s> <s> 5 9", "", "<s>"]
    assert encode_prompts(lm.config, tokenizer, prompts, 1) == [[BOS, 5, 9]] * 2 + [[BOS, BOS, 5, 9], [BOS], [BOS]]
    assert encode_prompts(lm.config, TOKENIZER, prompts, 1) == [[5, 9], [BOS, 5, 9], [BOS, BOS, 5, 9], [BOS], [BOS]]
    plain, begun = generate(lm, tokenizer, prompts[:1]), generate(lm, tokenizer, prompts[1:2])
    assert plain[0].token_ids == begun[0].token_ids
    likelihoods = measure_likelihoods(lm, tokenizer, prompts[:2], [" 12 30", " 12 30"])
    assert likelihoods.nll[0] == pytest.approx(likelihoods.nll[1])


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k must be.*got 0"),
        ({"top_k": VOCAB + 1}, f"top_k must be at most {VOCAB}.*got {VOCAB + 1}"),
        ({"top_p": 0.0}, "top_p must be.*got 0.0"),
        ({"top_p": 1.5}, "top_p must be.*got 1.5"),
        ({"top_p": float("nan")}, "top_p must be.*got nan"),
        ({"temperature": -1.0}, "temperature must be.*got -1.0"),
        ({"temperature": float("inf")}, "temperature must be.*got inf"),
        ({"beta": [1.0]}, "but there is no guide"),
        ({"kl_budget": -0.1}, "kl_budget must be.*got -0.1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be.*got 0"),
        ({"samples": 0}, "samples must be.*got 0"),
        ({"batch_size": 0}, "batch_size must be.*got 0"),
        ({"prompts": []}, "one or more texts, got"),
        ({"prompts": "5 6"}, "got '5 6'"),
    ],
)
def test_bad_options_are_named_with_their_value(options: dict[str, Any], message: str) -> None:
    prompts = options.pop("prompts", PROMPTS)
    with pytest.raises(OptionError, match=message) as caught:
        generate(make_lm("gpt2"), TOKENIZER, prompts, **options)
    assert caught.value.hint


def test_values_of_other_doors_are_explained(tmp_path: Path) -> None:
    """In a process of its own, since types are checked here."""
    program = """
import radq
from radq.toy import make_toy
reward = radq.RadQ.from_backbone(make_toy("toy"), attributes=["praise"])
for call in (
    lambda: radq.generate(None, None, [], None, radq.Steering()),
    lambda: radq.Steering(kl_budget="none"),
    lambda: radq.RewardGuide(reward, {"praise": "strong"}),
):
    try:
        call()
    except radq.errors.OptionError as error:
        print(error)
"""
    found = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    misplaced, budget, strength = found.stdout.splitlines()
    assert "top_k must be a whole number, got a Steering. hint: generate takes top_k" in misplaced
    assert "kl_budget must be 0 or more nats per token, got 'none'. hint: None sets no such limit" in budget
    assert "beta must be numbers, got {'praise': 'strong'}. hint: radq.load_guide reads strengths" in strength


def test_a_prompt_longer_than_the_context(lm_folders: dict[str, Path]) -> None:
    lm, model = make("gpt2", "q", lm_folders)
    with pytest.raises(ContextLengthError, match="prompt 1 has 60 tokens.*64 positions"):
        generate(lm, TOKENIZER, ["5", "5 " * 60])
    generate(lm, TOKENIZER, ["5 " * 60], max_new_tokens=4)
    with pytest.raises(ContextLengthError, match="64 tokens and the 1 before them.*64 positions"):  # the 1 is a BOS
        generate(lm, TOKENIZER, ["5 " * 60], RewardGuide(model, WEIGHTS), max_new_tokens=4)


def test_another_vocabulary(toy: Path, lm_folders: dict[str, Path]) -> None:
    guide = RewardGuide(RadQ.from_backbone(toy, attributes=["praise"]), {"praise": 1.0})
    with pytest.raises(VocabularyError, match="GPT2LMHeadModel"):
        generate(make_lm("gpt2"), TOKENIZER, ["5"], guide)


@pytest.mark.parametrize("kind", ["q", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_no_numbers(kind: str, value: float, lm_folders: dict[str, Path]) -> None:
    lm, model = make("gpt2", kind, lm_folders)
    with torch.no_grad():
        model.head.weight[0] = value
    with pytest.raises(RewardValueError, match="finite"):
        generate(lm, TOKENIZER, ["5 6"], RewardGuide(model, {"nice": 1.0}, clamp=False))


def test_an_argument_has_its_name_of_the_last_release_with_a_note() -> None:
    lm, tokenizer = make_lm("gpt2"), make_number_tokenizer()
    with pytest.warns(FutureWarning, match="num_samples is now samples"):
        old = generate(lm, tokenizer, ["5"], num_samples=2, max_new_tokens=2)  # pyright: ignore[reportCallIssue]
    assert [one.token_ids for one in old] == [
        one.token_ids for one in generate(lm, tokenizer, ["5"], samples=2, max_new_tokens=2)
    ]
    with pytest.raises(TypeError, match="num_samples and samples"):
        generate(lm, tokenizer, ["5"], samples=3, num_samples=2)  # pyright: ignore[reportCallIssue]
