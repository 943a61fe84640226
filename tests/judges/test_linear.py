"""The logistic regression behind linear judges: its optimum, what it holds out, and its files."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from radq.errors import DataError, ModelError, OptionError
from radq.judges.linear import PENALTIES, Card, LinearModel, fit_path, log_loss, split_rows

CARD = Card("minilm", "model@1", "praise", ["reviews.csv"])


def make_rows(n: int = 400, noise: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, 5))
    logits = features @ np.array([2.0, -1.0, 0.5, 0.0, 0.0]) + 0.3 + noise * rng.logistic(size=n)
    return features, (logits > 0).astype(np.float64)


def fit(features: np.ndarray, labels: np.ndarray) -> LinearModel:
    return LinearModel.fit(features, labels, split_rows(labels), CARD)


@pytest.mark.parametrize("soft", [False, True])
def test_fits_are_the_minimum_of_the_penalised_loss(soft: bool) -> None:
    features, labels = make_rows()
    labels = 0.2 + 0.6 * labels if soft else labels
    for penalty, (weight, bias) in zip(PENALTIES, fit_path(features, labels), strict=True):
        errors = expit(features @ weight + bias) - labels
        np.testing.assert_allclose(features.T @ errors / len(labels) + penalty * weight, 0, atol=1e-5)
        assert errors.mean() == pytest.approx(0, abs=1e-5)


def test_the_loss_worked_by_hand() -> None:
    found = log_loss(np.array([0.0, np.log(3), np.log(3)]), np.array([1.0, 1.0, 0.25]))
    assert found == pytest.approx(-(np.log(0.5) + np.log(0.75) + 0.25 * np.log(0.75) + 0.75 * np.log(0.25)) / 3)


def test_a_model_learns_and_measures_on_rows_it_has_not_seen() -> None:
    features, labels = make_rows(2000)
    model = fit(features, labels)
    assert model.card.rows == {"fitted": 1600, "chosen_on": 200, "measured_on": 200}
    assert 0.8 < model.card.metrics["auc"] < 1
    assert model.card.penalty in PENALTIES
    rows = split_rows(labels).measured_on
    right = (model.probabilities(features[rows]) > 0.5) == labels[rows]
    assert model.card.metrics["accuracy"] == pytest.approx(right.mean())


def test_rows_that_measure_do_not_change_the_fit() -> None:
    features, labels = make_rows()
    split = split_rows(labels)
    model = LinearModel.fit(features, labels, split, CARD)
    features[split.measured_on] = 9.0
    again = LinearModel.fit(features, labels, split, CARD)
    np.testing.assert_array_equal(model.weight, again.weight)
    assert model.card.metrics != again.card.metrics


def test_noise_wants_a_strong_penalty() -> None:
    rng = np.random.default_rng(0)
    noise = fit(rng.normal(size=(200, 60)), rng.integers(0, 2, 200).astype(np.float64))
    assert noise.card.penalty == max(PENALTIES)
    clear, labels = make_rows(4000, noise=0.05)
    assert fit(clear, labels).card.penalty < 1e-3


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 40), st.integers(3, 40), st.floats(0.01, 0.4), st.integers(0, 5))
def test_every_row_has_one_part_and_every_part_both_kinds(
    negative: int, positive: int, share: float, seed: int
) -> None:
    labels = np.random.default_rng(0).permutation(np.array([0.0] * negative + [1.0] * positive))
    split = split_rows(labels, share, seed)
    parts = [split.fitted, split.chosen_on, split.measured_on]
    assert sorted(np.concatenate(parts)) == list(range(negative + positive))
    assert all(set(labels[part]) == {0.0, 1.0} for part in parts)
    assert len(split.chosen_on) == len(split.measured_on)


def test_labels_between_are_probabilities() -> None:
    features = np.ones((60, 1)) * np.array([[1.0], [-1.0]] * 30)
    labels = np.where(features[:, 0] > 0, 0.8, 0.3)
    weight, bias = fit_path(features, labels)[-1]
    np.testing.assert_allclose(expit(np.array([1, -1]) * weight[0] + bias), [0.8, 0.3], atol=1e-3)


def test_files(tmp_path: Path) -> None:
    features, labels = make_rows()
    model = fit(features, labels)
    model.save(tmp_path / "judge")
    assert sorted(file.name for file in (tmp_path / "judge").iterdir()) == ["judge.json", "judge.safetensors"]
    again = LinearModel.load(tmp_path / "judge")
    np.testing.assert_array_equal(again.probabilities(features), model.probabilities(features))
    assert again.card == model.card
    assert again.digest() == model.digest() != fit(*make_rows(seed=1)).digest()
    assert json.loads((tmp_path / "judge" / "judge.json").read_text())["metrics"]["auc"] == model.card.metrics["auc"]


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no linear judge.*radq judge train"):
        LinearModel.load(tmp_path)
    fit(*make_rows()).save(tmp_path / "judge")
    (tmp_path / "judge" / "judge.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match="damaged"):
        LinearModel.load(tmp_path / "judge")
    with pytest.raises(OptionError, match="held_out must be .* got 0.5"):
        split_rows(np.array([0.0, 1.0] * 9), 0.5)
    with pytest.raises(DataError, match="at least 3 positive rows, got 2"):
        split_rows(np.array([0.0] * 9 + [1.0, 1.0]))
    with pytest.raises(DataError, match="from 0 to 1, got 0 to 5"):
        split_rows(np.array([0.0, 5.0]))
