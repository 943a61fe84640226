"""DExperts and GeDi: every shift and filter equals brute force, however the texts are batched, forked and rewound."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from baselines import CODES, make_experts, make_guide
from families import BOS, EOS, VOCAB, make_lm, make_number_tokenizer, make_reward
from hypothesis import given, settings
from hypothesis import strategies as st
from proposals import ConstantGuide, propose_all
from torch import Tensor
from transformers import LogitsProcessor

from radq import numerics
from radq.decoding.generate import generate, stream
from radq.decoding.steering import Steering, kl_divergence
from radq.errors import ContextLengthError, ModelError, OptionError, VocabularyError
from radq.guides.base import Guide
from radq.guides.dexperts import DExpertsGuide
from radq.guides.gedi import GeDiGuide, filter_candidates
from radq.guides.reward import RewardGuide
from radq.hosts.transformers import GuidedLogitsProcessor
from radq.models import kv_cache

FAMILIES = ["gpt2", "llama", "gemma3"]
METHODS = ["dexperts", "gedi"]
TOKENIZER = make_number_tokenizer()
PROMPTS = ["5 9 3 12 30", "11", "6 6 31 14 3 8 20 21", ""]
TEXTS = [[5, 9, 3, 12, 30, 8], [11], [BOS, 6, 6, 31], [BOS]]
FREE = Steering(top_k=None, kl_budget=None)
CANDIDATES = torch.tensor([[4, 9, 13, EOS], [0, 36, 9, 9], [7, 8, BOS, 3], [30, 31, 5, 6]])


def posteriors(guide: GeDiGuide, text: list[int], tokens: list[int]) -> list[float]:
    codes, priors = (CODES, (0.3, 0.7)) if guide.beta[0] >= 0 else (CODES[::-1], (0.7, 0.3))
    return oracle.gedi_posterior(guide.expert.lm, codes, text, tokens, 1.7, priors)


def by_hand(guide: Guide, text: list[int], tokens: list[int]) -> list[float]:
    if isinstance(guide, DExpertsGuide):
        return oracle.dexperts_shift(guide.expert.lm, guide.anti_expert.lm, guide.beta[0], text, tokens)
    assert isinstance(guide, GeDiGuide)
    return [abs(guide.beta[0]) * math.log(p) for p in posteriors(guide, text, tokens)]


def check(guide: Guide, state: Any, texts: list[list[int]], candidates: Tensor) -> None:
    expected = [by_hand(guide, text, row) for text, row in zip(texts, candidates.tolist(), strict=True)]
    torch.testing.assert_close(guide.advise(state, candidates).shift.tolist(), expected, atol=1e-9, rtol=1e-7)


@contextmanager
def count_forwards(guide: Guide) -> Iterator[list[int]]:
    """The number of forwards of each model of the guide."""
    counts = [0] * len(guide.readers)

    def count(n: int) -> None:
        counts[n] += 1

    hooks = [reader.model.register_forward_pre_hook(lambda *_, n=n: count(n)) for n, reader in enumerate(guide.readers)]
    yield counts
    for hook in hooks:
        hook.remove()


def padded(texts: list[list[int]], left: bool = True) -> tuple[Tensor, Tensor]:
    longest = max(map(len, texts))
    gaps = [[0] * (longest - len(text)) for text in texts]
    rows = [gap + text if left else text + gap for gap, text in zip(gaps, texts, strict=True)]
    ones = [gap + [1] * len(t) if left else [1] * len(t) + gap for gap, t in zip(gaps, texts, strict=True)]
    return torch.tensor(rows), torch.tensor(ones)


# --- shifts ---


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strength", [3.0, -2.0])
def test_shifts_equal_brute_force_all_along_a_text(method: str, family: str, strength: float) -> None:
    guide = make_guide(method, family, strength)
    texts = [list(text) for text in TEXTS]
    state = guide.start(*padded(texts))
    check(guide, state, texts, CANDIDATES)
    before = state
    for tokens in ([4, 36, 7, 31], [9, 9, EOS, 6]):
        state = guide.advance(state, torch.tensor(tokens))
        texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
        check(guide, state, texts, CANDIDATES)

    rows = torch.tensor([5, 0, 7, 7])
    check(guide, state.select(rows // 2), [texts[row // 2] for row in rows.tolist()], CANDIDATES)
    rewound = state.rewind(1)
    check(guide, rewound, [text[:-1] for text in texts], CANDIDATES)
    check(guide, guide.advance(rewound, torch.tensor([8, 8, 8, 8])), [[*text[:-1], 8] for text in texts], CANDIDATES)
    check(guide, state.rewind(2), TEXTS, CANDIDATES)
    check(guide, before, TEXTS, CANDIDATES)  # a state is a value


@pytest.mark.parametrize("method", METHODS)
def test_padding_and_batches_change_nothing(method: str) -> None:
    guide = make_guide(method, "llama")
    right = guide.start(*padded(TEXTS, left=False))
    check(guide, right, TEXTS, CANDIDATES)
    for text, candidates in zip(TEXTS, CANDIDATES, strict=True):
        check(guide, guide.start(torch.tensor([text])), [text], candidates[None])
    permuted = guide.advise(right, CANDIDATES.flip(1)).shift.flip(1)
    torch.testing.assert_close(permuted, guide.advise(right, CANDIDATES).shift)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("logits", [2**20, 2 * 8 * VOCAB])  # of a forward: for all texts at once, and for few
def test_one_reading_of_a_text_rewards_all_its_places(
    method: str, family: str, logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "LOGITS_PER_FORWARD", {"cpu": logits})
    guide = make_guide(method, family, strength=1.0)
    texts = [[5, 9, 3, 12, 30, 8], [11], [BOS, 6, VOCAB + 3, 31], [BOS]]
    places = torch.tensor([[0, 6, 3], [0, 1, 0], [4, 3, 2], [1, 1, 1]])
    candidates = torch.stack([CANDIDATES, CANDIDATES.flip(1), CANDIDATES.roll(1, 0)], dim=1)
    candidates[2, 0, 1] = VOCAB + 5
    found = guide.place_rewards(*padded(texts, left=False), places, candidates)
    assert found.shape == (4, 3, 4, 1)
    for n, text in enumerate(texts):
        for p, place in enumerate(places[n].tolist()):
            state = guide.start(torch.tensor([text[:place]]).long())
            expected = guide.advise(state, candidates[n, p, None]).rewards
            assert expected is not None
            torch.testing.assert_close(found[n, p], expected[0][0], atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_a_text_is_read_once_for_all_its_places(method: str) -> None:
    guide = make_guide(method)
    ids, mask = padded(TEXTS, left=False)
    with count_forwards(guide) as forwards:
        guide.place_rewards(ids, mask, torch.arange(7).expand(4, -1), torch.full((4, 7, 2), 5))
    assert forwards == [1] * len(guide.readers)


@pytest.mark.parametrize("method", METHODS)
def test_a_model_without_padding_reads_one_text_at_a_time(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = make_guide(method, "llama") if method == "dexperts" else GeDiGuide(make_experts("llama")[0], ([20], [22]))
    places, candidates = torch.tensor([[0, 6], [0, 1], [4, 2], [1, 0]]), torch.stack([CANDIDATES] * 2, dim=1)
    expected = guide.place_rewards(*padded(TEXTS, left=False), places, candidates)
    monkeypatch.setattr(kv_cache, "takes_padding", lambda model: False)
    with count_forwards(guide) as forwards:
        found = guide.place_rewards(*padded(TEXTS, left=False), places, candidates)
    assert forwards == [len(TEXTS)] * len(guide.readers)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gedi_reads_prompts_in_parts_where_their_logits_are_many(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "LOGITS_PER_FORWARD", {"cpu": 2 * 9 * VOCAB})
    guide = make_guide("gedi", family)
    texts = [*TEXTS, [7, 8]]
    candidates = torch.cat([CANDIDATES, CANDIDATES[:1]])
    with count_forwards(guide) as forwards:
        state = guide.start(*padded(texts))
    assert forwards == [9]  # ten rows of nine columns, a column at a time
    check(guide, state, texts, candidates)
    state = guide.advance(state, torch.tensor([4, 36, 7, 31, 9]))
    texts = [[*text, token] for text, token in zip(texts, [4, 36, 7, 31, 9], strict=True)]
    check(guide, state, texts, candidates)
    check(guide, state.rewind(1), [text[:-1] for text in texts], candidates)


@pytest.mark.parametrize("method", METHODS)
def test_prompts_are_rewound_too(method: str) -> None:
    guide = make_guide(method)
    texts = [[BOS, 5, 9], [BOS, 7, 30]]
    check(guide, guide.start(torch.tensor(texts)).rewind(2), [[BOS], [BOS]], CANDIDATES[:2])


def test_baselines_and_rewards_add(lm_folders: dict[str, Path]) -> None:
    reward = RewardGuide(make_reward("v", lm_folders["gpt2"]), {"nice": 2.0})
    parts = [make_guide("dexperts"), reward, make_guide("gedi", filter_p=0.5)]
    total = parts[0] + parts[1] + parts[2]
    state = total.start(*padded(TEXTS))
    expected = sum(part.advise(part.start(*padded(TEXTS)), CANDIDATES).shift for part in parts)
    advice = total.advise(state, CANDIDATES)
    torch.testing.assert_close(advice.shift, expected)
    logits = torch.randn(4, 4, dtype=torch.float64)
    alone = parts[2].advise(state.parts[2], CANDIDATES)
    assert advice.allowed(logits).tolist() == alone.allowed(logits).tolist()
    unfiltered = parts[0] + parts[1]
    assert unfiltered.advise(unfiltered.start(*padded(TEXTS)), CANDIDATES).allowed is None
    assert len(total.readers) == 4


@pytest.mark.parametrize("method", METHODS)
def test_every_row_may_have_its_own_strength(method: str) -> None:
    """For GeDi also of either sign, which is another class, and 0, for which nothing is filtered."""
    beta = [3.0, -2.0, 0.0, 0.5]
    guide, logits = make_guide(method), torch.randn(4, 4, dtype=torch.float64)
    together = guide.advise(guide.start(*padded(TEXTS)), CANDIDATES, torch.tensor(beta)[:, None])
    for row, strength in enumerate(beta):
        alone = make_guide(method, strength=strength)
        advice = alone.advise(alone.start(*padded(TEXTS)), CANDIDATES)
        torch.testing.assert_close(together.shift[row], advice.shift[row])
        if advice.allowed is not None:
            assert together.allowed(logits)[row].tolist() == advice.allowed(logits)[row].tolist()


def test_a_guide_without_strengths_counts_in_a_sum() -> None:
    """Hosts give the strengths of all rows, and such a guide has none among them."""
    experts, fixed = make_guide("dexperts"), ConstantGuide(torch.arange(VOCAB).double())
    guide, ids, candidates = experts + fixed, torch.tensor([TEXTS[0]]), CANDIDATES[:1]
    expected = experts.advise(experts.start(ids), candidates).shift + fixed.values[candidates]
    for beta in (None, torch.tensor([guide.beta])):
        torch.testing.assert_close(guide.advise(guide.start(ids), candidates, beta).shift, expected)


@pytest.mark.parametrize("method", METHODS)
def test_strength_zero_is_the_base(method: str) -> None:
    lm = make_lm("llama").double()
    plain = generate(lm, TOKENIZER, PROMPTS, samples=3, max_new_tokens=6)
    guided = generate(lm, TOKENIZER, PROMPTS, make_guide(method, "gpt2", 0.0), samples=3, max_new_tokens=6)
    assert [g.token_ids for g in plain] == [g.token_ids for g in guided]
    assert all(g.kl == 0 for g in guided)


# --- the filter ---


def test_the_filter_by_hand() -> None:
    # P(c): .9 .7 .5 .1, guided probability .1 .2 .3 .4: the last (.4) and the one before (.7) hold less than .8
    wanted, logits = torch.tensor([[0.9, 0.7, 0.5, 0.1]]).log(), torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    for filter_p, target_p, kept in [
        (0.8, 0.95, [True, True, False, False]),
        (0.8, 0.45, [True, True, True, False]),
        (0.5, 0.95, [True, True, True, False]),
        (0.3, 0.95, [True, True, True, True]),
        (1.0, 1.0, [True, False, False, False]),
        (1.0, 0.0, [True, True, True, True]),
    ]:
        assert filter_candidates(wanted, logits, filter_p, target_p).tolist() == [kept]


@settings(max_examples=50, deadline=None)
@given(st.floats(0.01, 0.99), st.floats(0.0, 1.0), st.integers(1, 12), st.integers(0, 999))
def test_the_filter_equals_brute_force(filter_p: float, target_p: float, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.rand(3, k, generator=generator, dtype=torch.float64)
    logits = 3 * torch.randn(3, k, generator=generator, dtype=torch.float64)
    logits[0, : k // 2] = -torch.inf  # what cannot be chosen holds nothing
    kept = filter_candidates(wanted.log(), logits, filter_p, target_p)
    assert (kept & ~logits.isneginf()).any(1).all()
    for row in range(3):
        expected = oracle.gedi_kept(wanted[row].tolist(), logits[row].tolist(), filter_p, target_p)
        possible = ~logits[row].isneginf()
        assert kept[row][possible].tolist() == torch.tensor(expected)[possible].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_filtered_decoding_equals_brute_force(family: str) -> None:
    lm = make_lm(family).double()
    guide = make_guide("gedi", "llama", 6.0, filter_p=0.6, target_p=0.7)
    texts = [[int(word) for word in prompt.split()] or [BOS] for prompt in PROMPTS for _ in range(2)]
    forbidden = 0
    options: dict[str, Any] = {"max_new_tokens": 3, "samples": 2, "seed": 3, "stop_token_ids": []}
    for step in stream(lm, TOKENIZER, PROMPTS, guide, Steering(top_k=6, temperature=0.8, kl_budget=None), **options):
        proposal = step.proposal
        for i, row in enumerate(step.rows.tolist()):
            base = oracle.base_logits(lm, texts[row])
            candidates = oracle.candidates(base, 6, None)
            assert sorted(proposal.candidates[i].tolist()) == sorted(candidates)
            wanted = posteriors(guide, texts[row], candidates)
            logits = [base[v].item() / 0.8 + 6 * math.log(p) for v, p in zip(candidates, wanted, strict=True)]
            kept = oracle.gedi_kept(wanted, logits, 0.6, 0.7)
            expected = torch.full_like(base, -torch.inf)
            expected[candidates] = torch.tensor(logits).double().masked_fill(~torch.tensor(kept), -torch.inf)
            actual = torch.full_like(base, -torch.inf)
            actual[proposal.candidates[i]] = proposal.logits[i].double()
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
            forbidden += kept.count(False)
            texts[row].append(int(step.tokens[i]))
    assert forbidden


def forbidding(allowed: list[bool]) -> ConstantGuide:
    return ConstantGuide(torch.tensor([0.0, 1.0, 2.0, 3.0]), allowed)


def test_a_row_is_never_left_without_candidates() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, 0.0]])
    none = propose_all(logits, forbidding([False] * 4), None, FREE)
    impossible = propose_all(logits, forbidding([False, True, False, False]), None, FREE)
    for proposal in (none, impossible):
        assert proposal.logits.tolist() == [[0.0, -math.inf, 2.0, 3.0]]
    both = forbidding([True, False, False, False]) + forbidding([False, False, True, True])
    assert propose_all(logits, both, both.start(torch.tensor([[5]])), FREE).logits.isfinite().sum() == 3
    some = propose_all(logits, forbidding([True, True, True, False]), None, FREE)
    assert some.logits.tolist() == [[0.0, -math.inf, 2.0, -math.inf]]


def test_what_the_filter_takes_counts_in_the_divergence() -> None:
    logits = torch.zeros(1, 4)
    guide = forbidding([True, True, False, False])
    free = propose_all(logits, guide, None, FREE)
    expected = torch.tensor([[0.0, 1.0, -math.inf, -math.inf]])
    torch.testing.assert_close(free.kl, kl_divergence(expected, logits))
    assert free.kl.item() > math.log(2)  # half of the candidates are gone
    tied = propose_all(logits, guide, None, Steering(top_k=None, kl_budget=math.log(2) + 0.01))
    assert tied.logits[0, 2:].isneginf().all()
    assert tied.kl.item() == pytest.approx(math.log(2) + 0.01, abs=1e-4)
    poor = propose_all(logits, guide, None, Steering(top_k=None, kl_budget=0.3))  # too little to forbid anything
    assert poor.logits.isfinite().all()
    assert poor.kl.item() == pytest.approx(0.3, abs=1e-4)


def test_forbidden_tokens_are_never_drawn() -> None:
    lm, guide = make_lm("gpt2").double(), make_guide("gedi", "gpt2", 20.0, filter_p=0.9, target_p=1.0)
    for step in stream(lm, TOKENIZER, PROMPTS, guide, Steering(kl_budget=None), samples=5, max_new_tokens=5):
        chosen = step.proposal.logits.gather(1, step.choice[:, None])
        assert chosen.isfinite().all()
        assert step.shifts.isfinite().all()
        assert step.proposal.logits.isneginf().any()


# --- in a host ---


class Fresh(LogitsProcessor):
    """A new processor at every call: nothing remembered, every text read from its beginning."""

    def __init__(self, *args: Any, **options: Any):
        self.make = lambda mask: GuidedLogitsProcessor(*args, mask, **options)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore
        return self.make((input_ids != 0).long())(input_ids, scores)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 0, "num_return_sequences": 2}])
def test_transformers_generate_follows_the_guide(method: str, options: dict[str, Any]) -> None:
    lm, guide = make_lm("gpt2").double(), make_guide(method, "llama", 4.0)
    inputs = TOKENIZER(PROMPTS[:3], padding=True, return_tensors="pt")

    def run(processor: LogitsProcessor) -> list[list[int]]:
        torch.manual_seed(0)
        limits: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "bad_words_ids": [[0]]}
        common = {"do_sample": False} | limits | options
        output = lm.generate(
            inputs.input_ids, attention_mask=inputs.attention_mask, logits_processor=[processor], **common
        )
        return output[:, inputs.input_ids.shape[1] :].tolist()

    texts = run(GuidedLogitsProcessor(guide, inputs.attention_mask, top_k=8))
    assert texts == run(Fresh(guide, top_k=8))


@pytest.mark.parametrize("method", METHODS)
def test_greedy_in_transformers_agrees_with_our_own_loop(method: str) -> None:
    lm, guide = make_lm("gpt2").double(), make_guide(method, "llama", 4.0)
    own = generate(lm, TOKENIZER, PROMPTS[:3], guide, 8, temperature=0, max_new_tokens=6, stop_token_ids=[])
    for prompt, expected in zip(PROMPTS, own, strict=False):
        inputs = TOKENIZER([prompt], return_tensors="pt")
        for options in ({}, {"prompt_lookup_num_tokens": 3}):
            processor = GuidedLogitsProcessor(guide, top_k=8)
            common: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **options}
            output = lm.generate(
                inputs.input_ids, attention_mask=inputs.attention_mask, logits_processor=[processor], **common
            )
            assert output[0, inputs.input_ids.shape[1] :].tolist() == expected.token_ids


@pytest.mark.parametrize("method", METHODS)
def test_any_order_of_calls_is_followed(method: str) -> None:
    lm, guide = make_lm("gpt2").double(), make_guide(method, "llama", 4.0)
    processor = GuidedLogitsProcessor(guide, top_k=5)
    for texts in (
        [[5, 9, 3]],
        [[5, 9, 3, 4]],
        [[5, 9, 3, 8, 8]],
        [[5, 9]],
        [[5, 9, 7], [5, 9, 8]],
        [[5, 9, 8, 3]],
        [[7]],
    ):
        scores = torch.stack([oracle.base_logits(lm, text) for text in texts])
        fresh = GuidedLogitsProcessor(guide, top_k=5)(torch.tensor(texts), scores)
        torch.testing.assert_close(processor(torch.tensor(texts), scores), fresh, atol=1e-5, rtol=1e-5)


# --- bad input ---


def test_mistakes_are_named(toy: Path, tmp_path: Path) -> None:
    expert, anti_expert = make_experts("gpt2")
    with pytest.raises(OptionError, match="alpha must be a finite number, got nan"):
        DExpertsGuide(expert, anti_expert, math.nan)
    for options, message in [
        ({"omega": math.inf}, "omega must be a finite number, got inf"),
        ({"filter_p": 1.2}, "filter_p must be.*got 1.2"),
        ({"target_p": -0.1}, "target_p must be.*got -0.1"),
        ({"prior": 0.0}, "prior must be.*got 0.0"),
        ({"codes": ([3], [3])}, r"both control codes are \[3\]"),
    ]:
        with pytest.raises(OptionError, match=message):
            GeDiGuide(expert, **({"codes": CODES} | options))
    with pytest.raises(ModelError, match="'expert' and 'anti'"):
        DExpertsGuide.from_pretrained(tmp_path, 1.0)
    with pytest.raises(ModelError, match="no control codes"):
        GeDiGuide.from_pretrained(toy)


@pytest.mark.parametrize(("method", "room"), [("dexperts", 63), ("gedi", 61)])
def test_texts_too_long_for_an_expert(method: str, room: int) -> None:
    guide = make_guide(method)
    guide.check_length(room)
    with pytest.raises(ContextLengthError, match=f"{room + 1} tokens.*64 positions"):
        guide.check_length(room + 1)
    state = guide.start(torch.full((1, room), 5))
    with pytest.raises(ContextLengthError, match=f"{room + 1} tokens"):
        guide.advance(state, torch.tensor([5]))
    with pytest.raises(ContextLengthError, match=f"{room + 1} tokens"):
        guide.start(torch.full((1, room + 1), 5))


@pytest.mark.parametrize("method", METHODS)
def test_another_vocabulary_is_refused(method: str) -> None:
    guide = make_guide(method)
    guide.check_vocabulary(VOCAB, TOKENIZER, "numbers")
    with pytest.raises(VocabularyError, match="50257.*expert's"):
        guide.check_vocabulary(50257, None, "gpt2")
    expert, _ = make_experts("gpt2")
    named = DExpertsGuide(expert, expert, 1.0, TOKENIZER)
    named.check_vocabulary(VOCAB + 8, TOKENIZER, "a padded one")
    bigger = make_lm("gpt2")
    bigger.resize_token_embeddings(VOCAB + 1, mean_resizing=False)
    with pytest.raises(VocabularyError, match="37 tokens, the anti-expert 38"):
        DExpertsGuide(expert, bigger, 1.0)
