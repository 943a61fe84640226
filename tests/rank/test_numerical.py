"""Numerical ranks of matrices and of reward models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from families import VOCAB, make_reward
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reward_data import make_data

from radq.data.dataset import RewardData
from radq.rank.numerical import (
    SHARES,
    count_above,
    is_tf32_forced,
    numerical_ranks,
    reward_rows,
    sample_prefixes,
    without_tf32,
)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 1000))
def test_ranks_are_those_of_torch(rank: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, rank, generator=generator, dtype=dtype) for size in (24, 40))
    rows = left @ right.T
    for result in numerical_ranks(rows, [4, 12, 24], torch.finfo(dtype).eps):
        expected = int(torch.linalg.matrix_rank(rows[: result.num_rows]))
        assert result.rank == expected == min(rank, result.num_rows)
        values = torch.linalg.svdvals(rows[: result.num_rows].double())
        assert result.spectrum == pytest.approx(values.tolist(), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-9, 1), min_size=1, max_size=12), st.integers(0, 1000))
def test_counts_are_those_of_a_matrix_with_known_singular_values(logarithms: list[float], seed: int) -> None:
    """The matrix is U diag(σ) Vᵀ with σ that lie clear of every cutoff, counted one by one."""
    values = sorted((10.0**number for number in logarithms), reverse=True)
    ratios = np.array(values)[:, None] / values[0] / np.array(SHARES)
    assume(np.all(np.abs(np.log(ratios)) > 1e-6))
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    left, right = (
        torch.linalg.qr(torch.randn(size, n, generator=generator, dtype=torch.float64)).Q for size in (n, 30)
    )
    rows = left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right.T
    (result,) = numerical_ranks(rows, [n], torch.finfo(torch.float32).eps)
    assert [(one.share, one.count) for one in result.counts] == [
        (share, len([value for value in values if value > share * values[0]])) for share in SHARES
    ]


def test_counts_by_hand() -> None:
    assert [one.count for one in count_above([8.0, 0.8, 0.08, 0.0], [0.5, 0.1, 0.05, 1e-9])] == [1, 1, 2, 3]
    assert [one.count for one in count_above([0.0, 0.0])] == [0] * len(SHARES)


def test_products_have_all_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with without_tf32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    assert not is_tf32_forced("cuda:0")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert is_tf32_forced("cuda:0")
    assert not is_tf32_forced("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RewardData:
    rng = np.random.default_rng(0)
    utterances = [rng.integers(3, VOCAB, size=rng.integers(1, 12)).tolist() for _ in range(50)]
    return make_data(tmp_path_factory.mktemp("data"), utterances, [0.0] * 50)


def test_prefixes_are_as_frequent_as_in_the_data(tmp_path: Path) -> None:
    data = make_data(tmp_path, [[1, 2, 3, 4], [5]], [0.0, 1.0])
    prefixes = [tuple(prefix.tolist()) for prefix in sample_prefixes(data, 5000, None, seed=0)]
    shares = {prefix: prefixes.count(prefix) / 5000 for prefix in set(prefixes)}
    expected = {(): 0.4, (1,): 0.2, (1, 2): 0.2, (1, 2, 3): 0.2}
    assert shares == pytest.approx(expected, abs=0.03)
    assert max(len(prefix) for prefix in sample_prefixes(data, 200, 2, seed=0)) == 1
    longer = {tuple(prefix.tolist()) for prefix in sample_prefixes(data, 5000, None, seed=0, shortest=1)}
    assert longer == {prefix for prefix in prefixes if prefix}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["q", "v"])
def test_rows_are_the_rewards_of_all_tokens(
    kind: str, family: str, data: RewardData, lm_folders: dict[str, Path]
) -> None:
    model = make_reward(kind, lm_folders[family])
    prefixes = sample_prefixes(data, 20, None, seed=1)
    rows = reward_rows(model, prefixes, "rude", batch_size=6)
    assert rows.shape == (20, VOCAB)
    for index in (0, 7, 19):
        for token in (3, 20):
            text = torch.tensor([[*prefixes[index].tolist(), token]])
            assert rows[index, token].item() == pytest.approx(model.token_rewards(text)[0, -1, 1].item(), abs=1e-9)


def test_rad_q_has_at_most_the_rank_of_its_hidden_size(data: RewardData, lm_folders: dict[str, Path]) -> None:
    prefixes = sample_prefixes(data, 30, None, seed=0)
    ranks = {}
    for kind in ("q", "v"):
        model = make_reward(kind, lm_folders["gpt2"])
        rows = reward_rows(model, prefixes, "nice")
        ranks[kind] = numerical_ranks(rows, [8, 30], torch.finfo(torch.float64).eps)[-1].rank
    assert ranks["q"] <= 16 < ranks["v"]  # the baseline adds nothing; reading the token does
