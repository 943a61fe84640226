"""A run has one scale of labels: for training, evaluation, resuming, distillation, and for files that are scored."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest

from radq.cli import main
from radq.data.label_scale import KEPT
from radq.errors import DataError, OptionError
from radq.models.reward import RewardModel
from radq.toy import make_reviews
from radq.training.config import ExpertTrainingConfig, RewardTrainingConfig
from radq.training.experts import train_experts
from radq.training.reward import train
from radq.training.run_folder import FINGERPRINTS, LABELS, scales_of_model

pytestmark = pytest.mark.filterwarnings("ignore:on the evaluation data the model does not beat a constant")


@pytest.fixture
def settings(calm_toy: Path, tmp_path: Path) -> RewardTrainingConfig:
    """Reviews with stars, and others to evaluate on that have neither 1 nor 5 stars."""
    write(tmp_path / "train.csv", [1 + 4 * praise for _, praise in make_reviews(16)])
    write(tmp_path / "eval.csv", [2 + praise for _, praise in make_reviews(16)])
    return RewardTrainingConfig(
        recipe="paper",
        data=[str(tmp_path / "train.csv")],
        eval_data=[str(tmp_path / "eval.csv")],
        labels="mood",
        backbone=str(calm_toy),
        out=str(tmp_path / "run"),
        cache=str(tmp_path / "cache"),
        batch_size=16,
        max_steps=2,
        save_steps=1,
    )


def write(file: Path, labels: list[Any]) -> None:
    texts = [text for text, _ in make_reviews(len(labels))]
    pandas.DataFrame({"text": texts, "mood": labels}).to_csv(file, index=False)


def stored_scale(folder: str | Path) -> dict[str, Any]:
    (scale,) = RewardModel.from_pretrained(folder).config.label_scales or []
    return scale


def test_evaluation_and_files_to_score_share_the_scale(
    settings: RewardTrainingConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = train(settings, progress=True)
    assert "label 'mood': 1 to 5 → 0 to 1 (change this with --label-range)" in capsys.readouterr().out
    labels = [(1 + praise) / 4 for _, praise in make_reviews(16)]
    mean = sum(praise for _, praise in make_reviews(16)) / 16
    expected = sum((label - mean) ** 2 for label in labels) / 16
    assert metrics["eval_constant_weighted_mse"] == pytest.approx(expected, rel=1e-4)
    assert (stored_scale(settings.out)["low"], stored_scale(settings.out)["high"]) == (1, 5)
    assert json.loads((Path(settings.out) / LABELS).read_text())["mood"] == stored_scale(settings.out)
    write(tmp_path / "new.csv", [2, 4])
    assert main(["score", "--reward", settings.out, "--data", str(tmp_path / "new.csv"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["agreement"]["mood"]
    assert found["constant_mse"] == pytest.approx(0.25**2)
    write(tmp_path / "eval.csv", [6])
    with pytest.raises(DataError, match="eval.csv, row 1: 'mood' must be a number from 1 to 5, got '6'"):
        train(settings, overwrite=True)


def test_a_resumed_run_keeps_its_scale(settings: RewardTrainingConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    train(settings)
    monkeypatch.setattr("radq.data.label_scale.USUAL_RANGES", ((0.0, 6.0),))  # as another version may decide
    train(settings, resume=True)
    assert stored_scale(settings.out)["low"] == 1
    with pytest.raises(OptionError, match="label_map from '' to '1=1,2=0"):
        train(replace(settings, label_map="1=1,2=0,3=0,4=0,5=0"), resume=True)


@pytest.mark.slow
def test_runs_and_models_of_earlier_versions_go_on(settings: RewardTrainingConfig) -> None:
    """They used numbers as they were, and stored no scale."""
    kept = replace(settings, keep_labels=True)
    train(kept)
    out = Path(settings.out)
    (out / LABELS).unlink()
    config = (out / "config.yaml").read_text().replace("keep_labels: true\n", "").replace("label_map: ''\n", "")
    (out / "config.yaml").write_text(config)
    before = (out / FINGERPRINTS).read_text()
    train(settings, resume=True)
    assert (out / FINGERPRINTS).read_text() == before
    model = RewardModel.from_pretrained(out)
    assert model.config.response_range == [1, 5]
    model.config.label_scales = None
    assert scales_of_model(model.config, "old") == [KEPT]
    model.config.response_range = [0.0, 1.0]
    assert scales_of_model(model.config, "old") == [None]


@pytest.mark.slow
def test_adapters_and_students_have_the_scale_of_their_teacher(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    teacher = replace(settings, kind="v", out=str(tmp_path / "teacher"), lora_rank=2, max_steps=1)
    train(teacher)
    assert stored_scale(teacher.out)["high"] == 5
    student = replace(settings, teacher=teacher.out, max_steps=1, data=settings.eval_data)
    train(student)  # labels from 2 to 3, which would be a scale of their own
    assert stored_scale(student.out) == stored_scale(teacher.out)
    assert json.loads((Path(student.out) / LABELS).read_text())["mood"]["high"] == 5


def test_words_train_experts(
    settings: RewardTrainingConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train.csv", ["Negative" if praise < 1 else "positive" for _, praise in make_reviews(16)])
    names = ("data", "labels", "backbone", "out", "cache", "batch_size", "max_steps")
    experts = ExpertTrainingConfig(**{name: getattr(settings, name) for name in names})
    train_experts(experts, progress=True)
    shown = capsys.readouterr().out
    assert "label 'mood': negative → 0, positive → 1" in shown
    high = sum(praise == 1 for _, praise in make_reviews(16))
    assert f"expert: {high} texts" in shown
    assert f"anti: {16 - high} texts" in shown


def test_words_in_rank(settings: RewardTrainingConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "train.csv", ["ham" if praise < 1 else "spam" for _, praise in make_reviews(16)])
    argv = ["rank", "data", *settings.data, "--labels", "mood", "--backbone", settings.backbone, "--ranks", "1"]
    assert main([*argv, "--cache", str(settings.cache), "--iterations", "2"]) == 0
    assert "label 'mood': ham → 0, spam → 1" in capsys.readouterr().out
