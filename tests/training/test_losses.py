"""Losses against examples worked by hand, and against loops over utterances."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radq.training.losses import (
    LOSSES,
    baseline_loss,
    cross_entropy_loss,
    distillation_loss,
    pair_prefixes,
    preference_loss,
    prefix_weights,
    squared_loss,
)


def test_weights_grow_with_the_prefix() -> None:
    mask = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 0], [0, 0, 0]])
    expected = [[1 / 6, 2 / 6, 3 / 6], [0, 1 / 3, 2 / 3], [1, 0, 0], [0, 0, 0]]
    torch.testing.assert_close(prefix_weights(mask), torch.tensor(expected))


def test_squared_loss_by_hand() -> None:
    rewards = torch.tensor([[[0.0], [1.0]], [[0.5], [9.0]]])  # (2, 2, 1); the second utterance has one token
    mask = torch.tensor([[1, 1], [1, 0]])
    labels = torch.tensor([[1.0], [0.0]])
    # first: 1/3 · (0−1)² + 2/3 · (1−1)² = 1/3; second: 1 · (0.5−0)² = 1/4
    assert squared_loss(rewards, mask, labels).item() == pytest.approx((1 / 3 + 1 / 4) / 2)


def test_squared_loss_sums_over_attributes() -> None:
    rewards = torch.tensor([[[0.0, 1.0, 0.5]]])
    labels = torch.tensor([[1.0, 0.0, 0.5]])
    assert squared_loss(rewards, torch.ones(1, 1), labels).item() == pytest.approx(2.0)


def test_cross_entropy_by_hand() -> None:
    rewards = torch.tensor([[[0.0], [2.0]]])
    # σ(0) = 1/2, so log 2 whatever the label; at the second token −log σ(2) · 3/4 − log σ(−2) · 1/4
    second = -0.75 * math.log(1 / (1 + math.exp(-2))) - 0.25 * math.log(1 / (1 + math.exp(2)))
    loss = cross_entropy_loss(rewards, torch.ones(1, 2, dtype=torch.long), torch.tensor([[0.75]]))
    assert loss.item() == pytest.approx(math.log(2) / 3 + second * 2 / 3)


@pytest.mark.parametrize("loss", LOSSES)
@given(
    known=st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=3, max_size=3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=20, deadline=None)
def test_missing_labels_have_no_loss_and_no_gradient(loss: str, known: list[list[bool]], seed: int) -> None:
    """The loss is the sum over single attributes of the loss of the rows that have their label, over all rows."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64).requires_grad_()
    labels, weights = (torch.rand(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (3,)))
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 0]])
    is_known = torch.tensor(known)
    found = LOSSES[loss](rewards, mask, torch.where(is_known, labels, torch.nan), weights)
    expected = rewards.new_zeros(())
    for a in range(2):
        rows = is_known[:, a]
        if rows.any():
            part = LOSSES[loss](rewards[rows][..., [a]], mask[rows], labels[rows][:, [a]], weights[rows])
            expected = expected + part * rows.sum() / 3
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, rewards)
    assert gradient.isfinite().all()
    assert (gradient.transpose(1, 2)[~is_known] == 0).all()


def test_distillation_and_baseline_by_hand() -> None:
    rewards = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    teacher = torch.tensor([[[1.0, 0.0], [7.0, 7.0]]])
    mask = torch.tensor([[1, 0]])
    assert distillation_loss(rewards, mask, teacher).item() == pytest.approx((0 + 4) / 2)
    assert baseline_loss(rewards, mask).item() == pytest.approx(1 + 4)  # summed over attributes, as on labels


rows = st.lists(st.integers(1, 6), min_size=1, max_size=4)  # lengths of utterances


def batch(lengths: list[int], left: bool, width: int, filler: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.full((len(lengths), width, 2), filler, dtype=torch.float64)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        where = slice(width - length, width) if left else slice(0, length)
        rewards[row, where] = torch.randn(length, 2, generator=generator, dtype=torch.float64)
        mask[row, where] = 1
    labels = torch.rand(len(lengths), 2, generator=generator, dtype=torch.float64)
    return rewards, mask, labels


def losses(rewards: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    teacher = torch.zeros_like(rewards)
    parts = [loss(rewards, mask, labels) for loss in LOSSES.values()]
    return torch.stack([*parts, distillation_loss(rewards, mask, teacher), baseline_loss(rewards, mask)])


@settings(max_examples=40, deadline=None)
@given(rows, st.booleans(), st.integers(6, 9), st.sampled_from([0.0, 1e30, math.nan, math.inf]), st.integers(0, 99))
def test_padding_never_enters_a_loss(lengths: list[int], left: bool, width: int, filler: float, seed: int) -> None:
    plain = losses(*batch(lengths, False, 6, 0.0, seed))
    padded = losses(*batch(lengths, left, width, filler, seed))
    torch.testing.assert_close(padded, plain)


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(0, 99))
def test_weighted_losses_are_the_mean_over_utterances(lengths: list[int], seed: int) -> None:
    rewards, mask, labels = batch(lengths, False, 6, 0.0, seed)
    torch.testing.assert_close(prefix_weights(mask).sum(1), torch.ones(len(lengths)))
    for loss in LOSSES.values():
        alone = [loss(rewards[i : i + 1], mask[i : i + 1], labels[i : i + 1]) for i in range(len(lengths))]
        torch.testing.assert_close(loss(rewards, mask, labels), torch.stack(alone).mean())


def test_gradients_at_padding_are_zero() -> None:
    rewards, mask, labels = batch([3, 1], False, 5, math.nan, 0)
    rewards.requires_grad_()
    losses(rewards, mask, labels).sum().backward()
    assert rewards.grad is not None
    assert not rewards.grad[mask == 0].any()
    assert rewards.grad[mask == 1].all()


# --- preferences ---


def overlaps(length: int, other: int) -> dict[tuple[int, int], Fraction]:
    """The weight of each pair of prefixes, as exact overlaps of the intervals from Λ_{t−1} to Λ_t of both texts."""

    def intervals(size: int) -> list[tuple[Fraction, Fraction]]:
        whole = size * (size + 1)
        return [(Fraction(t * (t - 1), whole), Fraction(t * (t + 1), whole)) for t in range(1, size + 1)]

    return {
        (i, j): min(end, other_end) - max(start, other_start)
        for i, (start, end) in enumerate(intervals(length))
        for j, (other_start, other_end) in enumerate(intervals(other))
        if min(end, other_end) > max(start, other_start)
    }


pairs = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=3)  # lengths of both texts


@given(pairs, st.booleans(), st.integers(7, 9), st.sampled_from([0.0, 1e30, math.nan, math.inf]), st.integers(0, 99))
def test_preference_loss_against_a_loop_over_all_prefixes(
    lengths: list[tuple[int, int]], left: bool, width: int, filler: float, seed: int
) -> None:
    rewards, mask, _ = batch([length for pair in lengths for length in pair], left, width, filler, seed)
    weights = torch.rand(len(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    total = 0.0
    for n, (length, other) in enumerate(lengths):
        chosen, rejected = (rewards[row][mask[row].bool()] for row in (2 * n, 2 * n + 1))
        for (i, j), weight in overlaps(length, other).items():
            for margin in (chosen[i] - rejected[j]).tolist():
                total += weights[n].item() * float(weight) * math.log1p(math.exp(-margin))
    found = preference_loss(rewards, mask, weights)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(total / len(lengths), rel=1e-6)


def test_prefixes_by_hand() -> None:
    """Λ is 1/3, 1 for two tokens and 1/6, 3/6, 1 for three."""
    found = overlaps(2, 3)
    assert found == {(0, 0): Fraction(1, 6), (0, 1): Fraction(1, 6), (1, 1): Fraction(1, 6), (1, 2): Fraction(1, 2)}
    prefixes = pair_prefixes(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    steps = zip(*(values[0].tolist() for values in prefixes), strict=True)
    assert {(i, j): pytest.approx(weight, abs=1e-6) for i, j, weight in steps if weight > 1e-6} == found


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=3), st.integers(0, 3))
def test_both_texts_keep_the_weights_of_their_prefixes(lengths: list[tuple[int, int]], before: int) -> None:
    columns = torch.arange(34)
    rows = torch.tensor([length for pair in lengths for length in pair])[:, None]
    mask = ((columns >= before) & (columns < before + rows)).long()
    prefixes = pair_prefixes(mask)
    usable = (rows.view(-1, 2) > 0).all(1)  # a text without tokens has no prefixes to compare
    for columns, texts in ((prefixes.chosen, mask[0::2]), (prefixes.rejected, mask[1::2])):
        sums = torch.zeros(len(lengths), 34).scatter_add(1, columns, prefixes.weights)
        torch.testing.assert_close(sums, prefix_weights(texts) * usable[:, None])


@given(st.integers(1, 9), st.floats(-5, 5), st.integers(0, 99))
def test_equal_texts_lose_log_2_and_swapped_texts_differ_by_their_margin(length: int, shift: float, seed: int) -> None:
    rewards, mask, _ = batch([length, length], False, length, 0.0, seed)
    same = rewards[:1].expand(2, -1, -1)
    assert preference_loss(same, mask).item() == pytest.approx(2 * math.log(2))  # two attributes
    # −log σ(x) + log σ(−x) = −x at every step, so the losses of a pair and of the swapped pair differ by the mean of x
    margin = ((rewards[0] - rewards[1]) * prefix_weights(mask)[0][:, None]).sum().item()
    assert (preference_loss(rewards, mask) - preference_loss(rewards.flip(0), mask)).item() == pytest.approx(
        -margin, abs=1e-5
    )
    moved = preference_loss(rewards + shift, mask)  # only differences count
    torch.testing.assert_close(moved, preference_loss(rewards, mask), atol=1e-9, rtol=1e-9)


def test_padding_has_no_gradient_in_the_preference_loss() -> None:
    rewards, mask, _ = batch([3, 5], False, 7, math.nan, 0)
    rewards.requires_grad_()
    preference_loss(rewards, mask).backward()
    assert rewards.grad is not None
    assert ((rewards.grad != 0).any(-1) == mask.bool()).all()
    assert rewards.grad.isfinite().all()
