"""Training on rows that lack some labels, or all of them."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import weights

from radq.errors import DataError, OptionError
from radq.models.reward import RewardModel
from radq.toy import make_reviews
from radq.training.config import RewardTrainingConfig
from radq.training.losses import compute_metrics, constant_metrics
from radq.training.reward import train

ROWS = [
    {"text": text, "praise": label, "blame": round(1 - label)} | ({} if n % 2 else {"mood": label / 2})
    for n, (text, label) in enumerate(make_reviews(60))
]


def write(file: Path, rows: list[dict[str, Any]], names: list[str]) -> str:
    with file.open("w", newline="") as stream:
        table = csv.DictWriter(stream, ["text", *names], extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    return str(file)


@pytest.fixture
def partly(settings: RewardTrainingConfig, tmp_path: Path) -> RewardTrainingConfig:
    """Two files: one without the column `mood`, one without `blame` and with holes in `mood`."""
    files = [
        write(tmp_path / "first.csv", ROWS[:30], ["praise", "blame"]),
        write(tmp_path / "second.csv", ROWS[30:], ["praise", "mood"]),
    ]
    changes: dict[str, Any] = {"labels": "praise,blame,mood", "missing_labels": True, "max_steps": 4}
    return replace(settings, data=files, eval_share=0.2, **changes)


def test_files_with_different_labels_train_together(partly: RewardTrainingConfig) -> None:
    metrics = train(partly)
    assert RewardModel.from_pretrained(partly.out).config.attributes == ["praise", "blame", "mood"]
    for attribute in ("praise", "blame", "mood"):
        assert np.isfinite(
            [metrics[f"eval_weighted_mse_{attribute}"], metrics[f"eval_constant_weighted_mse_{attribute}"]]
        ).all()
    lines = [json.loads(line) for line in (Path(partly.out) / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(line["loss"]) for line in lines if "loss" in line)


def test_rows_without_any_label_are_left_out(
    settings: RewardTrainingConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["praise", "mood"]
    short = replace(settings, labels="praise,mood", missing_labels=True, max_steps=4, eval_share=0.0)
    labelled = write(tmp_path / "labelled.csv", ROWS[:40], names)
    more = write(tmp_path / "more.csv", [*ROWS[:40], {"text": "good film"}, {"text": "bad plot"}], names)
    runs = [replace(short, data=[file], out=str(tmp_path / f"run-{Path(file).stem}")) for file in (labelled, more)]
    for one in runs:
        train(one, progress=True)
    assert "2 rows without any label are left out" in capsys.readouterr().out
    expected, found = (weights(one.out) for one in runs)
    assert expected.keys() == found.keys()
    assert all((expected[name] == found[name]).all() for name in expected)


def test_rows_of_a_program_may_lack_labels(settings: RewardTrainingConfig) -> None:
    short = replace(settings, labels="praise,mood", missing_labels=True, max_steps=2, data=[])
    metrics = train(short, data=ROWS[1:], eval_data=ROWS[:9])  # the first row lacks one
    assert np.isfinite(metrics["eval_weighted_mse_mood"])


def test_a_student_is_compared_with_the_labels_that_are_there(partly: RewardTrainingConfig, tmp_path: Path) -> None:
    train(replace(partly, kind="v", max_steps=2))
    student = replace(partly, teacher=partly.out, backbone="", out=str(tmp_path / "student"))
    metrics = train(replace(student, max_steps=2))
    assert np.isfinite(metrics["eval_weighted_mse_mood"])


def test_metrics_of_the_labels_that_are_there() -> None:
    """They are those of the rows with labels, and an attribute without any has none. A reward that is NaN shows."""
    rng = np.random.default_rng(0)
    stats, labels = rng.random((8, 6)), rng.random((8, 3)).round()
    known = np.zeros((8, 3), bool)
    known[:5, 0] = known[2:, 1] = True
    labels[[0, 3], [0, 1]], labels[[1, 4], [0, 1]] = 0, 1
    found = compute_metrics(stats, np.where(known, labels, np.nan), ["a", "b", "c"])
    constant = constant_metrics(np.where(known, labels, np.nan), np.ones(8), np.full(3, 0.5), ["a", "b", "c"], "mse")
    for n, (attribute, rows) in enumerate({"a": slice(5), "b": slice(2, None)}.items()):
        alone = compute_metrics(stats[rows][:, [n, 3 + n]], labels[rows][:, [n]], [attribute])
        assert found[f"auc_{attribute}"] == alone[f"auc_{attribute}"]
        assert found[f"accuracy_{attribute}"] == alone[f"accuracy_{attribute}"]
        assert found[f"weighted_mse_{attribute}"] == pytest.approx(alone["weighted_mse"])
        assert constant[f"constant_weighted_mse_{attribute}"] == pytest.approx(0.25)
    assert found["weighted_mse"] == pytest.approx(stats[:, 3:][known].mean())
    assert found["last_token_mse"] == pytest.approx(np.square(stats[:, :3] - labels)[known].mean())
    assert constant["constant_loss"] == pytest.approx(0.25 * known.sum() / 8)
    assert not [name for name in (*found, *constant) if name.endswith("_c")]
    stats[0, 3] = np.nan
    assert np.isnan(compute_metrics(stats, np.where(known, labels, np.nan), ["a", "b", "c"])["weighted_mse"])


def test_mistakes_are_named(partly: RewardTrainingConfig, tmp_path: Path) -> None:
    for change, message in [
        ({"labels": ""}, "missing_labels needs labels"),
        ({"labels": "praise", "spans": "marks"}, "missing_labels and spans exclude each other"),
        ({"pairs": "a,b", "labels": ""}, "missing_labels and pairs exclude each other"),
    ]:
        with pytest.raises(OptionError, match=message):
            train(replace(partly, **change))
    with pytest.raises(DataError, match=r"'mood' has no label|no column 'mood'"):
        train(replace(partly, missing_labels=False))
    with pytest.raises(DataError, match="no row has a label 'moody'"):
        train(replace(partly, labels="praise,moody"))
    rows = [{"text": "bad film", "praise": 0, "w": 1}, {"text": "film", "praise": 1, "mood": 1, "w": 0}]
    data = write(tmp_path / "weighted.csv", rows, ["praise", "mood", "w"])
    with pytest.raises(DataError, match="no row to train on has a label 'mood'"):
        train(replace(partly, data=[data], labels="praise,mood", weight="w", eval_share=0.0))
