"""radq score --data: rewards of a table in a copy of it, and their agreement with its labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from command_runs import fails

from radq.cli import main
from radq.data.examples import DataColumns
from radq.data.label_scale import LabelScale
from radq.errors import DataError
from radq.evaluation import table_scores
from radq.judges.agreement import measure_agreement
from radq.models.kinds import RadQ
from radq.models.reward import RewardModel
from radq.toy import make_reviews


@pytest.fixture(scope="module")
def reward(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    RadQ.from_backbone(toy, attributes=["praise", "length"]).save_pretrained(folder)
    return folder


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    rows = pandas.DataFrame(make_reviews(30), columns=["text", "praise"])
    rows["id"] = [f"{n:03}" for n in range(len(rows))]
    rows.to_csv(tmp_path / "reviews.csv", index=False)
    return tmp_path / "reviews.csv"


def rewards_one_by_one(folder: Path, texts: list[str], max_length: int = 512) -> np.ndarray:
    """Rewards at the last token, (n, a), each text alone."""
    model = RewardModel.from_pretrained(folder)
    assert model.tokenizer is not None
    rows = [model.tokenizer(text, add_special_tokens=False).input_ids[:max_length] for text in texts]
    with torch.no_grad():
        return np.array([model.token_rewards(torch.tensor([row]))[0, -1].tolist() for row in rows])


def score(capsys: pytest.CaptureFixture[str], *argv: Any) -> dict[str, Any]:
    assert main(["score", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "csv.gz"])
def test_rewards_of_a_table(kind: str, reward: Path, reviews: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pandas.read_csv(reviews, dtype={"id": str})
    source = reviews.parent / f"table.{kind}"
    {
        "csv": rows.to_csv,
        "csv.gz": rows.to_csv,
        "tsv": lambda file, index: rows.to_csv(file, index=index, sep="\t"),
        "jsonl": lambda file, index: rows.to_json(file, orient="records", lines=True),
        "parquet": rows.to_parquet,
    }[kind](source, index=False)
    found = score(capsys, "--reward", reward, "--data", source, "--batch-size", "7")
    target = source.with_name(f"table.scored.{kind}")
    assert found["out"] == str(target)
    read = {"jsonl": lambda f: pandas.read_json(f, lines=True, dtype={"id": str}), "parquet": pandas.read_parquet}
    separator = {"sep": "\t"} if kind == "tsv" else {}
    scored = read[kind](target) if kind in read else pandas.read_csv(target, dtype={"id": str}, **separator)
    pandas.testing.assert_frame_equal(scored[list(rows.columns)], rows, check_dtype=False)
    expected = rewards_one_by_one(reward, list(rows["text"]))
    np.testing.assert_allclose(scored[["reward_praise", "reward_length"]].to_numpy(), expected, atol=1e-5)
    assert found["texts"] == 30
    assert found["mean_rewards"]["length"] == pytest.approx(expected[:, 1].mean(), abs=1e-5)
    assert list(found["agreement"]) == ["praise"]  # the column that is named like an attribute
    agreement = measure_agreement(expected[:, 0], rows["praise"].to_numpy())
    for name in ("auc", "spearman", "mse", "constant_mse", "accuracy", "calibration_error"):
        assert found["agreement"]["praise"][name] == pytest.approx(getattr(agreement, name), abs=1e-5), name
    assert len(found["agreement"]["praise"]["bins"]) == 10


def test_what_is_printed(reward: Path, reviews: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["score", "--reward", str(reward), "--data", str(reviews), "--out", str(reviews.parent / "new" / "out.csv")]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    for part in ("30 texts; 0 cut off", "compared with the column 'praise'", "stay as they are", "AUC", "rank corr"):
        assert part in shown
    assert (reviews.parent / "new" / "out.csv").is_file()
    assert "exists" in fails(capsys, *argv)
    assert main([*argv, "--overwrite", "--labels", ""]) == 0
    assert "AUC" not in capsys.readouterr().out


def test_long_and_empty_texts(reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "the film was really very good and the plot was dull ."
    (tmp_path / "rows.csv").write_text(f"text,length\n{long},1\n  ,0\nfilm,0\n")
    argv = ("--reward", reward, "--data", tmp_path / "rows.csv")
    assert "row 2: 'text' is empty" in fails(capsys, "score", *map(str, argv), "--json")
    assert not (tmp_path / "rows.scored.csv").exists()
    found = score(capsys, *argv, "--skip-empty", "--max-length", "4")
    assert (found["texts"], found["truncated"], found["empty"]) == (2, 1, 1)
    scored = pandas.read_csv(tmp_path / "rows.scored.csv")["reward_length"]
    expected = rewards_one_by_one(reward, [long, "film"], 4)[:, 1]
    np.testing.assert_allclose(scored[[0, 2]], expected, atol=1e-5)
    assert np.isnan(scored[1])
    found = score(capsys, *argv, "--skip-empty", "--overwrite")  # the model has 64 positions
    assert found["truncated"] == 0


def test_a_context_stands_before_the_texts(reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.tsv").write_text("question\tanswer\nthe film\twas good\n")
    argv = ("--reward", reward, "--data", tmp_path / "rows.tsv", "--text", "answer")
    found = score(capsys, *argv, "--prompt", "question")
    assert found["mean_rewards"]["praise"] == pytest.approx(
        rewards_one_by_one(reward, ["the film was good"])[0, 0], abs=1e-5
    )


def test_labels_by_any_name_and_of_any_kind(reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"text": text, "mood": "good" if y > 0.5 else "bad", "n": y}) for text, y in make_reviews(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    argv = ("--reward", reward, "--data", tmp_path / "rows.jsonl", "--overwrite")
    found = score(capsys, *argv, "--labels", "praise=mood, length=n")["agreement"]
    assert found["praise"]["column"] == "mood"
    assert found["praise"]["scale"]["words"] == {"bad": 0, "good": 1}
    assert found["length"]["scale"]["words"] == {}
    turned = score(capsys, *argv, "--labels", "praise=mood", "--label-map", "good=0,bad=1")["agreement"]
    assert turned["praise"]["auc"] == pytest.approx(1 - found["praise"]["auc"])
    assert score(capsys, *argv)["agreement"] == {}


def test_labels_that_are_all_missing_are_refused_before_rewards_are_computed(
    reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none.csv").write_text("text,praise\nfilm,\n")
    monkeypatch.setattr(table_scores, "score_rows", lambda *_: pytest.fail("rewards were computed"))
    model, columns = RewardModel.from_pretrained(reward), DataColumns(labels=["praise"], missing_labels=True)
    with pytest.raises(DataError, match="no text has a label 'praise'"):
        table_scores.score_table(model, tmp_path / "none.csv", columns, [LabelScale()])


def test_mistakes(reward: Path, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["score", "--json", "--reward", str(reward), "--data"]
    assert "both texts and --data" in fails(capsys, "score", "film", *argv[1:], str(reviews))
    assert "no file" in fails(capsys, *argv, str(tmp_path / "missing.csv"))
    assert "no column 'body'" in fails(capsys, *argv, str(reviews), "--text", "body")
    assert "attributes are praise, length" in fails(capsys, *argv, str(reviews), "--labels", "joy")
    assert "no column 'joy'" in fails(capsys, *argv, str(reviews), "--labels", "praise=joy")
    assert "batch_size must be at least 1" in fails(capsys, *argv, str(reviews), "--batch-size", "0")
    (tmp_path / "part.csv").write_text("text,praise\nfilm,1\nplot,\n")
    assert "row 2: 'praise' has no label" in (error := fails(capsys, *argv, str(tmp_path / "part.csv")))
    assert "--labels ''" in error
    found = score(capsys, *argv[2:], tmp_path / "part.csv", "--missing-labels")
    assert sum(one["texts"] for one in found["agreement"]["praise"]["bins"]) == 1
    (tmp_path / "part.scored.csv").unlink()
    (tmp_path / "none.csv").write_text("text,praise\nfilm,\n")
    assert "no row has a label 'praise'" in fails(capsys, *argv, str(tmp_path / "none.csv"), "--missing-labels")
    (tmp_path / "none.csv").unlink()
    score(capsys, *argv[2:], tmp_path / "part.csv", "--labels", "")
    assert "has a column 'reward_praise' already" in fails(capsys, *argv, str(tmp_path / "part.scored.csv"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.csv", "part.scored.csv", "reviews.csv"]
