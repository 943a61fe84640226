"""A base with tokens that its guide does not know, as chat formats add them: they stay candidates, and are neutral."""

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from families import BOS, VOCAB, make_lm, make_number_tokenizer, make_reward
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq.decoding.best_of_n import best_of_n, score_texts
from radq.decoding.generate import generate, stream
from radq.decoding.steering import Steering
from radq.guides.base import Guide
from radq.guides.dexperts import DExpertsGuide
from radq.guides.gedi import GeDiGuide
from radq.guides.reward import RewardGuide
from radq.hosts.batching import Steerer
from radq.hosts.follower import HostRequest
from radq.hosts.transformers import GuidedLogitsProcessor
from radq.models.reward import RewardModel
from radq.registry.loaded_guides import LoadedGuides
from radq.registry.strengths import Guidance
from radq.sources.hub import quiet

START, END = VOCAB, VOCAB + 1  # ids of the added tokens
PROMPTS = ["5 9 3", f"<|im_start|> 11 {'7 ' * 3}<|im_end|>", "6 <|im_start|> 31 14 3 8"]
GUIDES = ["q", "v", "dexperts", "gedi", "sum"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = make_number_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


@pytest.fixture(scope="module", params=["gpt2", "gemma3"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def base(family: str) -> PreTrainedModel:
    """A finetune that has more tokens, and likes to end with one of them."""
    lm = make_lm(family).double()
    torch.manual_seed(7)
    with quiet():
        lm.resize_token_embeddings(VOCAB + 2)
    with torch.no_grad():
        lm.get_output_embeddings().weight[VOCAB:].normal_(std=1.5)
    return lm.eval()


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The original, which guides are made from, with its tokenizer and an embedding that is padded."""
    folder = tmp_path_factory.mktemp("original")
    with quiet():
        make_lm(family).save_pretrained(folder)
    make_number_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rewards(folder: Path) -> dict[str, RewardModel]:
    return {kind: make_reward(kind, folder) for kind in ("q", "v")}


def make_guide(kind: str, strength: float, rewards: dict[str, RewardModel]) -> Guide:
    if kind in rewards:
        return RewardGuide(rewards[kind], {"nice": strength}, clamp=False)
    if kind == "sum":
        return make_guide("q", strength, rewards) + make_guide("gedi", strength, rewards)
    family = "llama"
    if kind == "dexperts":
        anti = make_lm(family).double()
        with torch.no_grad():
            anti.lm_head.weight.mul_(0.7)
        return DExpertsGuide(make_lm(family).double(), anti, strength, make_number_tokenizer())
    return GeDiGuide(make_lm(family).double(), ((9,), (10,)), strength, filter_p=0.0, tokenizer=make_number_tokenizer())


@pytest.mark.parametrize("kind", GUIDES)
def test_beta_zero_is_the_base_stop_tokens_included(
    kind: str, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rewards: dict[str, RewardModel]
) -> None:
    options: dict[str, Any] = {"samples": 8, "max_new_tokens": 8, "stop_token_ids": [END], "top_k": None}
    plain = generate(base, tokenizer, PROMPTS, **options)
    guided = generate(base, tokenizer, PROMPTS, make_guide(kind, 0.0, rewards), **options)
    assert [g.token_ids for g in guided] == [g.token_ids for g in plain]
    assert {g.finish_reason for g in plain} == {"stop", "length"}
    assert any(START in g.token_ids for g in plain)


def known_only(tokens: list[int]) -> list[int]:
    return [token for token in tokens if token < VOCAB]


def prefix_reward(model: RewardModel, prefix: list[int]) -> torch.Tensor:
    hidden = oracle.hidden(model, known_only(prefix))
    if model.config.kind == "q":
        return torch.stack([hidden @ weight for weight in model.head.baseline_weight])
    return model.head.weight @ hidden + model.head.bias


@pytest.mark.parametrize("kind", ["q", "v"])
def test_every_step_equals_brute_force(
    kind: str, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rewards: dict[str, RewardModel]
) -> None:
    """The unknown are not read, and have the reward of the prefix; perplexity is over the whole vocabulary."""
    model, guide = rewards[kind], make_guide(kind, 0.5, rewards)
    texts = [ids for ids in tokenizer(PROMPTS).input_ids for _ in range(3)]
    seen = set()
    for step in stream(
        base, tokenizer, PROMPTS, guide, Steering(None, kl_budget=None), 6, samples=3, stop_token_ids=[]
    ):
        for i, row in enumerate(step.rows.tolist()):
            logits = oracle.base_logits(base, texts[row])
            rewards_by_hand = [
                oracle.reward(model, known_only(texts[row]), v) if v < VOCAB else prefix_reward(model, texts[row])
                for v in range(VOCAB + 2)
            ]
            expected = logits + 0.5 * torch.stack(rewards_by_hand)[:, 0]
            actual = torch.full_like(expected, -torch.inf)
            actual[step.proposal.candidates[i]] = step.proposal.logits[i].double()
            torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
            token = int(step.tokens[i])
            torch.testing.assert_close(
                step.log_probabilities[i].double(), logits.log_softmax(0)[token], atol=1e-5, rtol=1e-5
            )
            texts[row] = [*texts[row], token]
            seen.add(token)
    assert {START, END} <= seen  # rows were held while others went on


@pytest.mark.parametrize("kind", ["dexperts", "gedi"])
def test_experts_read_on_as_if_the_unknown_were_not_there(kind: str, rewards: dict[str, RewardModel]) -> None:
    guide = make_guide(kind, 2.0, rewards)
    candidates = torch.tensor([[4, START, 9], [4, END, 9]])
    state = guide.start(torch.tensor([[START, 5, 9], [7, END, 6]]))
    for tokens in ([8, START], [END, 3], [START, END], [12, 13]):
        state = guide.advance(state, torch.tensor(tokens))
    plain = guide.start(torch.tensor([[5, 9, 8, 12], [7, 6, 3, 13]]))
    torch.testing.assert_close(guide.advise(state, candidates).shift, guide.advise(plain, candidates).shift)
    known = guide.advise(plain, torch.tensor([[4, 4, 9], [4, 4, 9]])).shift
    torch.testing.assert_close(guide.advise(plain, candidates).shift[:, ::2], known[:, ::2])
    joined = state.join([state, guide.start(torch.tensor([[5, START, 5, 5, 5, 5]]))])
    torch.testing.assert_close(
        guide.advise(joined, candidates[[0, 1, 0]]).shift[:2], guide.advise(plain, candidates).shift
    )


def test_an_unknown_token_is_neutral_for_dexperts_and_gedi(rewards: dict[str, RewardModel]) -> None:
    """As likely under both experts; the posterior of the prefix."""
    text = torch.tensor([[5, 9, 3]])
    unknown = torch.tensor([[START]])
    dexperts = make_guide("dexperts", 2.0, rewards)
    assert isinstance(dexperts, DExpertsGuide)
    normalisers = [
        oracle._run(expert.lm, [], [5, 9, 3])[1][-1].logsumexp(0).item()
        for expert in (dexperts.expert, dexperts.anti_expert)
    ]
    found = dexperts.advise(dexperts.start(text), unknown).shift.item()
    assert found == pytest.approx(2 * (normalisers[0] - normalisers[1]))
    gedi = make_guide("gedi", 2.0, rewards)
    assert isinstance(gedi, GeDiGuide)
    posterior = oracle.gedi_posterior(gedi.expert.lm, [[9], [10]], [5, 9], [3])[0]
    assert gedi.advise(gedi.start(text), unknown).shift.exp().item() == pytest.approx(posterior**2)


@pytest.mark.parametrize("kind", ["q", "v"])
def test_hosts_follow_unknown_tokens_and_rollbacks_over_them(
    kind: str, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rewards: dict[str, RewardModel]
) -> None:
    guide = make_guide(kind, 3.0, rewards)
    processor = GuidedLogitsProcessor(guide, torch.ones(1, 2, dtype=torch.long), top_k=None, tokenizer=tokenizer)
    calls = [[5, 9], [5, 9, START], [5, 9, START, 7], [5, 9, START, 7, END], [5, 9, START, 8], [5, 9, 4], [5, 9, 4, 4]]
    places = {str(place): (0, place) for place in range(len(guide.beta))}
    strengths = {str(place): beta for place, beta in enumerate(guide.beta)}
    request = HostRequest(Guidance(strengths, Steering(None)), [5, 9], [], stops=(tokenizer.eos_token_id,))
    steerer = Steerer(LoadedGuides([guide], places), 1, 30)
    for text in calls:
        scores = oracle.base_logits(base, text)[None]
        fresh = GuidedLogitsProcessor(
            guide, torch.ones(1, len(text), dtype=torch.long), top_k=None, tokenizer=tokenizer
        )
        expected = fresh(torch.tensor([text]), scores)
        torch.testing.assert_close(processor(torch.tensor([text]), scores), expected, atol=1e-5, rtol=1e-5)
        request.output[:] = text[2:]
        guided = scores.clone()
        steerer.steer(guided, {0: request})
        torch.testing.assert_close(guided, expected, atol=1e-5, rtol=1e-5)
        assert expected.isfinite().all()


@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.lists(st.integers(3, VOCAB + 1), min_size=2, max_size=2), min_size=1, max_size=6))
def test_held_rows_equal_reading_the_known_tokens_anew(steps: list[list[int]], rewards: dict[str, RewardModel]) -> None:
    for model in rewards.values():
        state = model.read(torch.tensor([[5, 9, 3, 12, 30], [7, 8, 6, 6, 6]]))
        texts = [[5, 9, 3, 12, 30], [7, 8, 6, 6, 6]]
        candidates = torch.tensor([[4, START, 9], [20, 4, END]])
        for tokens in steps:
            _, state = model.score(state, candidates)
            state = state.advance(torch.tensor(tokens))
            texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
        for row, text in enumerate(texts):
            expected = model.next_rewards(torch.tensor([known_only(text)]), None, candidates[row : row + 1])
            found = model.score(state, candidates)[0][row : row + 1]
            torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)


def test_the_best_of_n_leaves_unknown_tokens_out(
    base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rewards: dict[str, RewardModel]
) -> None:
    model = rewards["v"]
    scores = score_texts(model, {"nice": 1.0}, [[BOS, 5, START, 9, END], [BOS, 5, 9]])
    assert scores[0].item() == pytest.approx(scores[1].item())
    assert len(best_of_n(base, tokenizer, PROMPTS, model, {"nice": 1.0}, n=3)) == len(PROMPTS)
