"""Heads against their formulas, written out by hand in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radq.errors import OptionError
from radq.models.heads import HEADS, LinearHead, MlpHead, build_head, score_candidates, score_tokens

D, A, V = 6, 3, 11


def make(name: str) -> tuple[LinearHead, Tensor]:
    torch.manual_seed(0)
    head = build_head(name, D, A, V).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head, torch.randn(V, D, dtype=torch.float64)


def by_hand(head: LinearHead, embedding: Tensor, h: Tensor, token: int) -> Tensor:
    """Marginal rewards of one token after one hidden state, (a,)."""
    if isinstance(head, MlpHead):
        inner = [head.mixing_weight @ embedding @ head.weight[a].T @ h for a in range(A)]  # W_2 E W_aᵀ h
        return torch.stack([head.token_weight[token] @ F.gelu(x) for x in inner])
    return torch.stack([h @ (head.weight[a] @ embedding[token]) for a in range(A)])


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_tokens_and_candidates_follow_the_formula(name: str) -> None:
    head, embedding = make(name)
    hidden = torch.randn(2, 4, D, dtype=torch.float64)
    tokens = torch.randint(V, (2, 4))
    marginals = score_tokens(head.features(hidden, embedding), head.table(embedding), tokens)
    for b in range(2):
        for t in range(4):
            torch.testing.assert_close(marginals[b, t], by_hand(head, embedding, hidden[b, t], int(tokens[b, t])))

    features = head.features(hidden[:, 0], embedding)
    whole = score_candidates(features, head.table(embedding), None)
    assert whole.shape == (2, V, A)
    for token in range(V):
        torch.testing.assert_close(whole[1, token], by_hand(head, embedding, hidden[1, 0], token))


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_the_baseline_is_linear_in_the_hidden_state(name: str) -> None:
    head, _ = make(name)
    hidden = torch.randn(5, D, dtype=torch.float64)
    if name == "linear-nobaseline":
        assert not head.baseline(hidden).any()
    else:
        torch.testing.assert_close(head.baseline(hidden), hidden @ head.baseline_weight.T)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(HEADS)), st.integers(1, 2 * V), st.integers(1, 4), st.integers(0, 99))
@torch.no_grad()
def test_candidates_agree_with_the_whole_vocabulary_in_any_order_and_number(
    name: str, k: int, b: int, seed: int
) -> None:
    head, embedding = make(name)
    generator = torch.Generator().manual_seed(seed)
    features = head.features(torch.randn(b, D, generator=generator, dtype=torch.float64), embedding)
    table = head.table(embedding)
    candidates = torch.randint(V, (b, k), generator=generator)  # b·k passes |V|: both ways of scoring are taken
    rewards = score_candidates(features, table, candidates)
    whole = score_candidates(features, table, None)
    torch.testing.assert_close(rewards, whole.gather(1, candidates[..., None].expand(-1, -1, A)))
    order = torch.randperm(k, generator=generator)
    torch.testing.assert_close(score_candidates(features, table, candidates[:, order]), rewards[:, order])


@torch.no_grad()
def test_the_reward_matrix_of_a_linear_head_has_at_most_rank_d() -> None:
    head, _ = make("linear")
    embedding = torch.randn(200, D, dtype=torch.float64)
    hidden = torch.randn(100, D, dtype=torch.float64)
    rewards = score_candidates(head.features(hidden, embedding), embedding, None) + head.baseline(hidden)[:, None]
    assert torch.linalg.matrix_rank(rewards[..., 0]) == D  # the baseline lies in the span of H: it adds nothing


@torch.no_grad()
def test_the_mlp_head_is_not_linear() -> None:
    head, embedding = make("mlp")
    hidden = torch.randn(2, D, dtype=torch.float64)
    one, two, both = (head.features(h[None], embedding) for h in (hidden[0], hidden[1], hidden.sum(0)))
    assert not torch.allclose(one + two, both, atol=1e-3)


def test_the_mlp_mixes_once_outside_training_and_notices_new_weights() -> None:
    head, embedding = make("mlp")
    assert isinstance(head, MlpHead)
    with torch.no_grad():
        first = head.mixing(embedding)
        assert head.mixing(embedding) is first
        head.mixing_weight.mul_(2)
        torch.testing.assert_close(head.mixing(embedding), 2 * first)
    assert head.mixing(embedding).requires_grad


@torch.no_grad()
def test_the_mlp_notices_weights_that_torch_does_not_see_change() -> None:
    """Its product stays in its place, since captured steps read it there."""
    head, embedding = make("mlp")
    assert isinstance(head, MlpHead)
    first = head.mixing(embedding)
    for change in (lambda: head.mixing_weight.data.mul_(2), lambda: embedding.data[3, 1:2].add_(1)):
        change()
        head.notice_changes(embedding)
        assert head.mixing(embedding) is first
        torch.testing.assert_close(first, head.mixing_weight @ embedding)
    head.half()
    head.notice_changes(embedding)
    assert head.mixing(embedding).dtype == torch.float16


def test_an_unknown_head_is_named() -> None:
    with pytest.raises(OptionError, match="linear-nobaseline.*'cubic'"):
        build_head("cubic", D, A, V)
