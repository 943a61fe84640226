"""Peeling and completion against brute force in float64, and the paper's lemmas as numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radq import numerics
from radq.errors import DataError, MemoryLimitError, OptionError
from radq.rank.completion import Factors, complete, degeneracy, group_entries, peel, solve_rows
from radq.rank.matrix import Observed


def make_observed(n: int = 30, m: int = 20, density: float = 0.3, seed: int = 0, binary: bool = False) -> Observed:
    rng = np.random.default_rng(seed)
    dense = rng.integers(0, 2, (n, m)).astype(float) if binary else rng.normal(size=(n, m))
    known = rng.random((n, m)) < density
    known[np.arange(n), rng.integers(0, m, n)] = True
    known[rng.integers(0, n, m), np.arange(m)] = True
    return Observed.of(np.where(known, dense, np.nan))


def objective(observed: Observed, factors: Factors, penalty: float) -> float:
    a, b = factors.a.double().numpy(), factors.b.double().numpy()
    residuals = observed.values - (a @ b.T)[observed.rows, observed.columns]
    return float((residuals**2).sum() + penalty * ((a**2).sum() + (b**2).sum()))


# --- half steps ---


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.floats(0.05, 0.9), st.integers(0, 5), st.booleans())
def test_each_row_is_a_ridge_regression(rank: int, density: float, seed: int, anchored: bool) -> None:
    observed = make_observed(density=density, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    known = torch.randn(observed.shape[1], rank, generator=generator, dtype=torch.float64)
    before = torch.randn(observed.shape[0], rank, generator=generator, dtype=torch.float64)
    target = before.clone()
    groups = group_entries(observed.rows, observed.columns, observed.values, known)
    squares = solve_rows(groups, known, target, 0.1, anchored)
    expected = 0.0
    for row in range(observed.shape[0]):
        entries = observed.rows == row
        x, y = known.numpy()[observed.columns[entries]], observed.values[entries]
        anchor = before[row].numpy() if anchored else np.zeros(rank)
        solution = anchor + np.linalg.solve(x.T @ x + 0.1 * np.eye(rank), x.T @ (y - x @ anchor))
        np.testing.assert_allclose(target[row].numpy(), solution, atol=1e-8)
        expected += ((y - x @ solution) ** 2).sum()
    assert float(squares) == pytest.approx(expected, rel=1e-6)


def test_groups_hold_every_entry_once() -> None:
    observed = make_observed(200, 150, 0.1)
    groups = group_entries(observed.rows, observed.columns, observed.values, torch.zeros(150, 1))
    found = sorted(
        (int(row), int(column), float(value))
        for group in groups
        for row, columns, values in zip(group.rows, group.neighbours, group.values, strict=True)
        for column, value in zip(columns, values, strict=True)
        if column < 150
    )
    wanted = zip(
        observed.rows.tolist(), observed.columns.tolist(), observed.values.astype(np.float32).tolist(), strict=True
    )
    assert found == sorted(wanted)


# --- whole completions ---


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, 5, 9])
def test_the_objective_falls_to_where_nothing_changes(rank: int) -> None:
    observed = make_observed(density=0.6, binary=True)
    penalty = 1e-2
    runs = [complete(observed, rank, penalty, iterations=n, tolerance=0.0).factors for n in (20, 40, 3000)]
    found = [objective(observed, factors, penalty) for factors in runs]
    assert found[0] >= found[1] >= found[2]
    factors = runs[-1]
    a, b = factors.a.clone().requires_grad_(), factors.b.clone().requires_grad_()
    rows, columns, values = (torch.from_numpy(part) for part in (observed.rows, observed.columns, observed.values))
    loss = (values - (a[rows] * b[columns]).sum(1)).square().sum() + penalty * (a.square().sum() + b.square().sum())
    loss.backward()
    assert a.grad is not None
    assert b.grad is not None
    assert max(float(a.grad.abs().max()), float(b.grad.abs().max())) < 2e-2


def test_errors_are_those_of_the_product() -> None:
    observed = make_observed()
    result = complete(observed, 3)
    product = (result.factors.a @ result.factors.b.T).numpy()
    expected = np.mean((observed.values - product[observed.rows, observed.columns]) ** 2)
    assert result.mse == pytest.approx(expected, rel=1e-9)
    assert np.linalg.matrix_rank(product) == 3


def test_rank_zero_is_the_zero_matrix() -> None:
    observed = make_observed()
    assert complete(observed, 0).mse == pytest.approx(np.mean(observed.values**2))


def test_float32_comes_near() -> None:
    observed = make_observed(density=0.5, binary=True)
    exact = complete(observed, 4, penalty=1e-2, iterations=300, tolerance=0.0)
    single = complete(observed, 4, penalty=1e-2, iterations=300, tolerance=0.0, dtype=torch.float32)
    assert single.mse == pytest.approx(exact.mse, rel=0.2)


def test_existing_factors_are_used_as_the_start() -> None:
    observed = make_observed(density=0.6, binary=True)
    whole = complete(observed, 4, iterations=30, tolerance=0.0)
    first = complete(observed, 4, iterations=20, tolerance=0.0)
    rest = complete(observed, 4, iterations=10, tolerance=0.0, start=first.factors)
    if len(peel(observed, 4).core) == 0:
        pytest.fail("the matrix has no core: the two would take different steps")
    assert rest.mse <= first.mse
    assert rest.mse == pytest.approx(whole.mse, rel=0.5)
    wider = complete(observed, 8, iterations=5, tolerance=0.0, start=first.factors)
    assert wider.mse < first.mse
    assert complete(observed, 2, iterations=5, tolerance=0.0, start=first.factors).factors.rank == 2


def test_tolerance_stops_early_and_progress_counts() -> None:
    observed = make_observed(density=0.6, binary=True)
    seen: list[float] = []
    result = complete(observed, 4, iterations=500, tolerance=0.05, progress=seen.append)
    assert len(seen) == result.iterations < 500


def test_iterations_continue_while_the_target_is_in_reach() -> None:
    """The penalty is most of the objective, so a change of the error hardly shows in it."""
    observed = make_observed(60, 50, density=0.25, binary=True)
    rank = degeneracy(observed)
    early = complete(observed, rank, tolerance=0.05, target=0.0)
    target = early.mse / 1.5
    longer = complete(observed, rank, tolerance=0.05, target=target)
    assert longer.mse <= target
    assert longer.iterations > early.iterations
    hopeless = complete(observed, rank, tolerance=0.05, target=1e-300)
    assert hopeless.iterations == early.iterations


# --- peeling ---


def peel_slowly(observed: Observed, rank: int) -> set[tuple[int, int]]:
    left = set(zip(observed.rows.tolist(), observed.columns.tolist(), strict=True))
    while True:
        for side in (0, 1):
            for end in {entry[side] for entry in left}:
                mine = {entry for entry in left if entry[side] == end}
                if len(mine) <= rank:
                    left -= mine
                    break
            else:
                continue
            break
        else:
            return left


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 8), st.floats(0.05, 0.9), st.integers(0, 1000))
def test_the_core_is_what_cannot_be_peeled(rank: int, density: float, seed: int) -> None:
    observed = make_observed(12, 10, density, seed)
    peeling = peel(observed, rank)
    core = set(zip(observed.rows[peeling.core].tolist(), observed.columns[peeling.core].tolist(), strict=True))
    assert core == peel_slowly(observed, rank)
    entries = np.concatenate([entries for _, entries in peeling.rounds] + [peeling.core])
    assert sorted(entries.tolist()) == list(range(len(observed)))
    assert (rank >= degeneracy(observed)) == (len(core) == 0)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.1, 0.5), st.integers(0, 1000))
@example(0.2421875, 100)  # a system whose condition is beyond float64
@example(0.12667600350684058, 842)  # factors so large that the penalty outweighs the error
def test_values_in_general_position_are_met_at_the_degeneracy(density: float, seed: int) -> None:
    observed = make_observed(40, 30, density, seed)
    enough = degeneracy(observed)
    assert complete(observed, enough, penalty=1e-9, iterations=50, tolerance=0.0).mse < 1e-3
    with_room = complete(observed, min(30, 2 * enough), penalty=1e-9, iterations=50, tolerance=0.0)
    assert with_room.mse < 1e-7  # where factors are large, the penalty's optimum gives up some 1e-8 for smaller ones


# --- the paper's lemmas ---


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-3, 3)), min_size=2, max_size=30))
def test_one_entry_per_row_has_a_completion_of_rank_one(entries: list[tuple[int, float]]) -> None:
    dense = np.full((len(entries), 10), np.nan)
    for row, (column, value) in enumerate(entries):
        dense[row, column] = value
    observed = Observed.of(dense[:, ~np.isnan(dense).all(0)])
    assert degeneracy(observed) == 1
    assert complete(observed, 1, penalty=1e-9, iterations=20).mse < 1e-8


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.floats(0.1, 1.0))
def test_rewards_that_ignore_the_context_have_rank_one(seed: int, density: float) -> None:
    observed = make_observed(density=density, seed=seed)
    by_token = np.random.default_rng(seed).normal(size=observed.shape[1]) + 3
    observed = Observed(observed.rows, observed.columns, by_token[observed.columns], observed.shape)
    assert complete(observed, 1, penalty=1e-9, iterations=500, tolerance=1e-9).mse < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_one_missing_value_lowers_the_rank(seed: int) -> None:
    k = 6
    full = np.random.default_rng(seed).normal(size=(k, k))
    assert np.linalg.matrix_rank(full) == k
    missing = full.copy()
    missing[0, 0] = np.nan
    # the value that makes the determinant vanish, from the expansion along the first column
    minors = [(-1) ** i * np.linalg.det(np.delete(np.delete(full, i, 0), 0, 1)) for i in range(k)]
    missing[0, 0] = -sum(full[i, 0] * minors[i] for i in range(1, k)) / minors[0]
    assert np.linalg.matrix_rank(missing, tol=1e-9) == k - 1
    missing[0, 0] = np.nan
    assert complete(Observed.of(missing), k - 1, penalty=1e-9, iterations=600, tolerance=0.0).mse < 1e-4
    assert complete(Observed.of(full), k - 1, penalty=1e-9, iterations=600, tolerance=0.0).mse == pytest.approx(
        np.linalg.svd(full)[1][-1] ** 2 / k**2, rel=1e-3
    )  # all known: no better than the smallest singular value


def test_stacking_rows_with_one_entry_costs_one_rank() -> None:
    """Lemma 3: the rank for Ω is at most 1 + the rank for Ω_2."""
    rng = np.random.default_rng(0)
    block = rng.normal(size=(8, 2)) @ rng.normal(size=(2, 6))
    single = np.full((5, 6), np.nan)
    single[np.arange(5), rng.integers(0, 6, 5)] = rng.normal(size=5)
    completed = np.vstack([block, np.nansum(single, axis=1, keepdims=True) * np.ones((5, 6))])
    assert np.linalg.matrix_rank(completed) <= 3
    observed = Observed.of(np.vstack([block, single]))
    assert complete(observed, 3, penalty=1e-9, iterations=500).mse < 1e-6


# --- certificates and mistakes ---


def test_certificates_belong_to_their_matrix(tmp_path: Path) -> None:
    observed, other = make_observed(seed=0), make_observed(seed=1)
    result = complete(observed, 3)
    result.factors.save(tmp_path / "three.safetensors", observed)
    assert Factors.load(tmp_path / "three.safetensors", observed).mse(observed) == pytest.approx(result.mse, rel=1e-12)
    with pytest.raises(DataError, match="does not belong"):
        Factors.load(tmp_path / "three.safetensors", other)
    (tmp_path / "broken.safetensors").write_bytes(b"no certificate")
    with pytest.raises(DataError, match="certificate"):
        Factors.load(tmp_path / "broken.safetensors", observed)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rank": -1}, "rank must be at least 0 .* got -1"),
        ({"rank": 21}, "at most 20 for a matrix of 30 × 20, got 21"),
    ],
)
def test_wrong_options(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        complete(make_observed(), **options)


def test_a_completion_too_large_for_memory_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "available_memory", lambda device="cpu": 1000)
    with pytest.raises(MemoryLimitError, match="rank 2"):
        complete(make_observed(), 2)
