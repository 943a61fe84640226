"""Guides: signed weights add up, clamping is counted, and mistakes are named."""

from pathlib import Path

import oracle
import pytest
import torch
from families import VOCAB, make_reward
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from radq.errors import ContextLengthError, OptionError, UnknownAttributeError, VocabularyError
from radq.guides.reward import RewardGuide
from radq.models.kinds import RadQ
from radq.toy import make_tokenizer

PREFIXES = torch.tensor([[5, 9, 3], [7, 7, 30]])
CANDIDATES = torch.tensor([[4, 9, 13, 2], [0, 36, 9, 9]])


def rewards_by_hand(model, clamp: bool) -> torch.Tensor:
    rows = [[oracle.reward(model, p.tolist(), int(v)) for v in c] for p, c in zip(PREFIXES, CANDIDATES, strict=True)]
    rewards = torch.stack([torch.stack(row) for row in rows])
    low, high = torch.tensor(model.config.attribute_ranges, dtype=rewards.dtype).T
    return rewards.clamp(low, high) if clamp else rewards


@pytest.mark.parametrize("kind", ["q", "v"])
@pytest.mark.parametrize("clamp", [True, False])
def test_the_shift_is_the_weighted_sum_of_rewards(kind: str, clamp: bool, lm_folders: dict[str, Path]) -> None:
    model = make_reward(kind, lm_folders["gpt2"])
    guide = RewardGuide(model, {"rude": -3, "nice": 2.5}, clamp)
    rewards = rewards_by_hand(model, clamp)
    state = guide.start(PREFIXES)
    torch.testing.assert_close(guide.advise(state, CANDIDATES).shift, 2.5 * rewards[..., 0] - 3 * rewards[..., 1])

    clipped = guide.advise(state, CANDIDATES).clipped
    outside = (rewards_by_hand(model, False) != rewards_by_hand(model, True)).any(-1)
    assert outside.any()
    assert not outside.all()
    assert clipped is None if not clamp else clipped.tolist() == outside.tolist()


def test_guides_add(lm_folders: dict[str, Path]) -> None:
    q, v = (make_reward(kind, lm_folders["gpt2"]) for kind in ("q", "v"))
    parts = [RewardGuide(q, {"nice": 2}), RewardGuide(v, {"rude": -1}), RewardGuide(q, {"rude": 4}, clamp=False)]
    total = parts[0] + parts[1] + parts[2]
    tokens = torch.tensor([9, 36])

    def walk(guide):
        state = guide.start(PREFIXES)
        shifts = [guide.advise(state, CANDIDATES).shift]
        state = guide.advance(state, tokens)
        shifts.append(guide.advise(state, CANDIDATES).shift)
        state = state.select(torch.tensor([1, 0]))
        shifts.append(guide.advise(state, CANDIDATES).shift)
        shifts.append(guide.advise(state.rewind(1), CANDIDATES).shift)
        return torch.stack(shifts)

    torch.testing.assert_close(walk(total), sum(walk(part) for part in parts))
    state = total.start(PREFIXES)
    expected = [part.advise(inner, CANDIDATES).clipped for part, inner in zip(parts, state.parts, strict=True)]
    assert expected[2] is None
    assert total.advise(state, CANDIDATES).clipped.tolist() == (expected[0] | expected[1]).tolist()


@pytest.mark.parametrize("kind", ["q", "v"])
def test_every_row_may_have_its_own_strengths(kind: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward(kind, lm_folders["gpt2"])
    guide = RewardGuide(model, {"rude": -3, "nice": 2.5}) + RewardGuide(model, {"nice": 1.0}, clamp=False)
    beta = torch.tensor([[1.0, -2.0, 0.5], [0.0, 4.0, -1.0]])
    found = guide.advise(guide.start(PREFIXES), CANDIDATES, beta).shift
    for row, (rude, nice, free) in enumerate(beta.tolist()):
        alone = RewardGuide(model, {"rude": rude, "nice": nice}) + RewardGuide(model, {"nice": free}, clamp=False)
        expected = alone.advise(alone.start(PREFIXES), CANDIDATES).shift[row]
        torch.testing.assert_close(found[row], expected)


@pytest.mark.parametrize("kind", ["q", "v"])
def test_one_forward_per_step_whatever_k(kind: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward(kind, lm_folders["gpt2"])
    guide = RewardGuide(model, {"nice": 1.0})
    guide.advise(guide.start(PREFIXES), CANDIDATES)  # past the first use, which tries what the backbone can do
    read = []
    model.backbone.register_forward_pre_hook(
        lambda _, __, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    state = guide.start(PREFIXES)
    for candidates in (CANDIDATES, torch.arange(VOCAB).expand(2, -1)):
        state = guide.advise(state, candidates).state
        state = guide.advance(state, candidates[:, 1])
    prompt = PREFIXES.shape[1] + 1  # and the BOS
    assert read == (
        [prompt, 1, 1] if kind == "q" else [prompt, CANDIDATES.shape[1], VOCAB]
    )  # RAD-V keeps the chosen one


def test_a_guide_turns_dropout_off(lm_folders: dict[str, Path]) -> None:
    model = make_reward("q", lm_folders["gpt2"]).train()
    assert not RewardGuide(model, {"nice": 1.0}).model.training


def test_unknown_attributes_are_named(lm_folders: dict[str, Path]) -> None:
    model = make_reward("q", lm_folders["gpt2"])
    with pytest.raises(UnknownAttributeError, match="'toxicity'.*nice, rude"):
        RewardGuide(model, {"toxicity": 1.0})
    for beta in ({}, {"nice": float("nan")}):
        with pytest.raises(OptionError, match="beta"):
            RewardGuide(model, beta)


def test_a_text_too_long_for_the_reward_model(lm_folders: dict[str, Path]) -> None:
    guide = RewardGuide(make_reward("q", lm_folders["gpt2"]), {"nice": 1.0})
    guide.check_length(63)
    with pytest.raises(ContextLengthError, match="64 tokens and the 1 before them.*64 positions"):
        (guide + guide).check_length(64)


# --- vocabularies ---


@pytest.fixture
def guide(toy: Path) -> RewardGuide:
    return RewardGuide(RadQ.from_backbone(toy, attributes=["praise"]), {"praise": 1.0})


def test_another_vocabulary_is_refused(guide: RewardGuide, toy_tokenizer: PreTrainedTokenizerBase, toy: Path) -> None:
    size = guide.model.vocabulary.size
    guide.check_vocabulary(size, toy_tokenizer, "toy")
    guide.check_vocabulary(size, None, "toy")
    with pytest.raises(VocabularyError, match="toy.*50257"):
        guide.check_vocabulary(50257, None, "toy")

    extended = AutoTokenizer.from_pretrained(toy)
    extended.add_special_tokens({"pad_token": "[PAD]"})  # what people do to batch; the meaning of the other ids stays
    guide.check_vocabulary(size + 64, extended, "toy")

    tokens = make_tokenizer().backend_tokenizer.to_str().replace("▁film", "▁opera")
    other = make_tokenizer()
    other._tokenizer = type(other.backend_tokenizer).from_str(tokens)
    with pytest.raises(VocabularyError, match="an-opera-model"):
        guide.check_vocabulary(size, other, "an-opera-model")


def test_tokens_beyond_the_reward_models_are_no_candidates(guide: RewardGuide) -> None:
    assert guide.vocab_size == len(make_tokenizer())


@pytest.mark.parametrize("kind", ["q", "v"])
def test_each_attribute_is_clamped_to_its_own_range(kind: str, lm_folders: dict[str, Path]) -> None:
    model = make_reward(kind, lm_folders["gpt2"], response_range=[(-0.1, 0.1), (-100, 100)])
    guide = RewardGuide(model, {"rude": -3, "nice": 2.5})
    state = guide.start(PREFIXES)
    expected = rewards_by_hand(model, clamp=True) @ torch.tensor([2.5, -3.0], dtype=torch.float64)
    advice = guide.advise(state, CANDIDATES)
    torch.testing.assert_close(advice.shift, expected)
    clipped = rewards_by_hand(model, clamp=False)[..., 0].abs() > 0.1
    assert clipped.any()
    assert torch.equal(advice.clipped, clipped)
