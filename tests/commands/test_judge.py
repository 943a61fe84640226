"""radq judge: scores for people and machines, judges fitted from files, and one line for mistakes."""

import json
from pathlib import Path

import pandas
import pytest
from classifiers import WORDS, make_classifier
from command_runs import fails

from radq.cli import main
from radq.judges.models import load_judge


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    return make_classifier(tmp_path / "classifier")


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    texts = [f"{a} {b} {c}" for a in WORDS[4:] for b in ("good", "bad") for c in WORDS[4:]]
    rows = {"body": [*texts, " "], "praise": [*(float("good" in text) for text in texts), 0.0]}
    pandas.DataFrame(rows).to_csv(tmp_path / "rows.csv", index=False)
    return tmp_path / "rows.csv"


def test_score(classifier: Path, labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["judge", "score", "--judge", f"classifier:{classifier}", "--cache", str(tmp_path / "cache")]
    assert main([*argv, "a good film", " ", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    judge = load_judge(f"classifier:{classifier}")
    assert document["judge"] == judge.name
    assert document["texts"][0]["score"] == pytest.approx(judge.score(["a good film"])[0])
    assert document["texts"][1] == {"text": " ", "score": None}
    assert (tmp_path / "cache" / "judges.sqlite").is_file()
    assert main([*argv, "--data", str(labelled), "--text", "body", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["texts"]
    assert len(rows) == len(pandas.read_csv(labelled))
    assert rows[-1]["score"] is None
    assert main([*argv, "a good film", "", "good " * 99]) == 0
    text = capsys.readouterr().out
    assert judge.name in text
    assert f"{document['texts'][0]['score']:.3f}" in text
    assert "blank" in text
    assert "1 texts were too long" in text


def test_train_and_score(labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = make_classifier(tmp_path / "encoder", kind="encoder")
    argv = ["judge", "train", "--data", str(labelled), "--text", "body", "--labels", "praise"]
    argv += ["--encoder", str(encoder), "--out", str(tmp_path / "out")]
    assert main([*argv, "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["metrics"]["auc"] > 0.9
    assert card["blank"] == 1
    stored = json.loads((tmp_path / "out" / "judge.json").read_text())
    assert stored["rows"] == {"fitted": 160, "chosen_on": 20, "measured_on": 20}
    assert "exists" in fails(capsys, *argv)
    assert main([*argv, "--overwrite", "--limit", "100"]) == 0
    text = capsys.readouterr().out
    assert "auc" in text
    assert "1 blank ones are left out" in text
    score = ["judge", "score", "--judge", f"linear:{tmp_path / 'out'}", "--cache", str(tmp_path / "cache"), "--json"]
    assert main([*score, "the good film", "the bad film"]) == 0
    good, bad = (row["score"] for row in json.loads(capsys.readouterr().out)["texts"])
    assert good > 0.7 > 0.3 > bad


def test_labels_may_be_words(labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pandas.read_csv(labelled)
    rows["praise"] = rows["praise"].map({0.0: "Bad", 1.0: "good"})
    rows.to_csv(labelled, index=False)
    argv = ["judge", "train", "--data", str(labelled), "--text", "body", "--labels", "praise", "--overwrite"]
    argv += ["--encoder", str(make_classifier(tmp_path / "encoder", kind="encoder")), "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    assert "label 'praise': bad → 0, good → 1" in capsys.readouterr().out
    assert "none of them is a label in praise" in fails(capsys, *argv, "--label-map", "grim=0,fun=1")


def test_mistakes(labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ambiguous = make_classifier(tmp_path / "ambiguous", ["LABEL_0", "LABEL_1"])
    score = ["judge", "score", "a"]
    assert "classifier, onnx, linear, reward, not" in fails(capsys, *score, "--judge", "oracle")
    assert "LABEL_0, LABEL_1" in fails(capsys, *score, "--judge", f"classifier:{ambiguous}")
    assert "no text" in fails(capsys, "judge", "score", "--judge", f"classifier:{ambiguous}#LABEL_1")
    lost = ["judge", "score", "--judge", f"classifier:{ambiguous}#LABEL_1", "--data", str(labelled)]
    assert "no column 'text'" in fails(capsys, *lost)
    train = ["judge", "train", "--data", str(labelled), "--text", "body", "--out", str(tmp_path / "out")]
    assert "no column 'fun'" in fails(capsys, *train, "--labels", "fun")
    assert "at most 0.4, got 0.9" in fails(capsys, *train, "--labels", "praise", "--held-out", "0.9")
    assert "limit must be at least 1, got 0" in fails(capsys, *train, "--labels", "praise", "--limit", "0")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as exit_:
        main(["judge"])
    assert exit_.value.code == 2
