"""radq rank: what people and machines read, and one line for mistakes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from families import make_number_tokenizer
from test_cli import fails

from radq import memory
from radq.backbones import load_tokenizer
from radq.cli import main
from radq.errors import ModelError
from radq.models import RadQ
from radq.rank.analysis import RankResult, give_verdict
from radq.rank.completion import complete
from radq.rank.factors import Factors
from radq.rank.matrix import RewardMatrix
from radq.toy import make_reviews

SHARED = Path(__file__).parent.parent.parent / "shared"


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A csv file; what is cached stays in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = "".join(f'"{text}",{praise}\n' for text, praise in make_reviews(400))
    (tmp_path / "reviews.csv").write_text("text,praise\n" + rows)
    return tmp_path / "reviews.csv"


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_data_has_a_table_and_a_verdict(reviews: Path, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = reviews.parent
    argv = ("rank", "data", str(reviews), "--labels", "praise", "--backbone", str(toy), "--ranks", "0,2,12,30")
    saved = ("--save-matrix", str(folder / "matrix.npz"), "--certificates", str(folder / "certificates"))
    result = run_json(capsys, *argv, *saved)
    assert result.keys() >= {
        *("utterances", "prefixes", "entries", "omega2_rows", "omega2_columns", "omega2_entries"),
        *("omega2_value_sum", "table", "verdict", "peak_memory"),
    }
    assert [row["rank"] for row in result["table"]] == [0, 2, 12, 30]
    assert result["table"][0].keys() >= {"rank", "mse", "mse_nm", "iterations", "seconds"}
    matrix = RewardMatrix.load(folder / "matrix.npz")
    omega2 = matrix.omega2
    assert result["table"][0]["mse"] == pytest.approx(np.mean(omega2.values**2))
    size = omega2.shape[0] * omega2.shape[1]
    assert result["table"][1]["mse_nm"] == pytest.approx(result["table"][1]["mse"] * len(omega2) / size)
    assert result["table"][3]["mse"] < 1e-6 < result["table"][1]["mse"]
    bound = min(row["bound"] for row in result["table"] if row["bound"])
    assert f"rank {bound} at most" in result["verdict"]
    assert str(toy) in result["verdict"]
    # the matrix is enough for a second look, which goes on from the certificates
    again = run_json(capsys, "rank", "data", str(folder / "matrix.npz"), "--ranks", "2", *saved[2:])
    assert again["table"][0]["mse"] <= result["table"][1]["mse"] * 1.001
    # and whoever has both checks the claim
    checked = run_json(
        capsys, "rank", "verify", str(folder / "matrix.npz"), str(folder / "certificates/rank-12.safetensors")
    )
    assert checked["rank"] == 12
    assert checked["mse"] == pytest.approx(result["table"][2]["mse"], rel=1e-9)


def test_people_read_a_table(reviews: Path, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", "data", str(reviews), "--labels", "praise", "--tokenizer", str(toy)]) == 0
    captured = capsys.readouterr().out
    assert "400 utterances" in captured
    assert "any backbone with a hidden size of" in " ".join(captured.split())
    assert "peak memory" in captured


def test_verdicts_when_the_rank_is_too_high_or_never_enough(
    reviews: Path, toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("rank", "data", str(reviews), "--labels", "praise", "--tokenizer", str(toy))
    matrix = reviews.parent / "matrix.npz"
    result = run_json(capsys, *argv, "--ranks", "0,1", "--save-matrix", str(matrix))
    assert "No rank tried reaches" in result["verdict"]
    found = RankResult(30, 1e-8, 1e-9, 5, 0.1, bound=31)
    verdict = give_verdict(RewardMatrix.load(matrix), [found], 1e-6, "tiny", hidden_size=16)
    assert "more than the hidden size 16 of tiny" in verdict


def test_without_two_continuations_the_rank_is_one(
    tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "one.csv").write_text("text,praise\nthe film was good,1\n")
    result = run_json(capsys, "rank", "data", str(tmp_path / "one.csv"), "--labels", "praise", "--tokenizer", str(toy))
    assert result["omega2_entries"] == 0
    assert result["table"] == []
    assert "rank 1" in result["verdict"]


def test_mistakes_are_one_line(
    reviews: Path, toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = reviews.parent
    argv = ("rank", "data", str(reviews), "--json", "--labels", "praise", "--tokenizer", str(toy))
    assert "there is no tokenizer" in fails(capsys, *argv[:6])
    assert "label is" in fails(capsys, *argv[:4], "--tokenizer", str(toy))
    assert "each label has its own" in fails(capsys, *argv, "--labels", "praise,text")
    assert "whole numbers" in fails(capsys, *argv, "--ranks", "one")
    assert "the rank is 100000" in fails(capsys, *argv, "--ranks", "100000")
    assert "penalty is -1" in fails(capsys, *argv, "--ranks", "2", "--penalty", "-1")
    assert "eps is nan" in fails(capsys, *argv, "--ranks", "2", "--eps", "nan")
    assert "there is no folder" in fails(capsys, *argv[:6], "--tokenizer", "./nowhere")
    (folder / "bad.csv").write_text("text,praise\nthe film was good,inf\n")
    assert "row 1: 'praise' is 'inf'" in fails(capsys, "rank", "data", str(folder / "bad.csv"), *argv[3:])
    assert "reward matrix" in fails(capsys, "rank", "verify", str(reviews), str(reviews))
    saved = ("--save-matrix", str(folder / "m.npz"), "--certificates", str(folder / "c"))
    run_json(capsys, *argv[:3], *argv[4:], "--ranks", "2", *saved)
    matrix = RewardMatrix.load(folder / "m.npz")
    Factors(torch.zeros(3, 2), torch.zeros(4, 2)).save(folder / "other.safetensors", matrix.omega2)
    assert "does not belong" in fails(
        capsys, "rank", "verify", str(folder / "m.npz"), str(folder / "other.safetensors")
    )
    monkeypatch.setattr(memory, "available_memory", lambda device="cpu": 1000)
    assert "takes" in fails(capsys, *argv, "--ranks", "2")


def test_model_draws_ranks(reviews: Path, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = reviews.parent
    RadQ.from_backbone(toy, attributes=["praise"]).save_pretrained(folder / "reward")
    argv = ("rank", "model", str(folder / "reward"), "--data", str(reviews), "--rows", "8,32,64")
    result = run_json(capsys, *argv, "--out", str(folder / "out"))
    assert [row["num_rows"] for row in result["ranks"]] == [8, 32, 64]
    assert all(row["rank"] <= result["hidden_size"] for row in result["ranks"])
    assert (result["kind"], result["dtype"]) == ("q", "float32")
    assert json.loads((folder / "out/rank.json").read_text()) == result
    for plot in ("rank.png", "spectrum.png"):
        assert (folder / "out" / plot).read_bytes().startswith(b"\x89PNG")
    assert main([*argv]) == 0
    assert "cutoff" in capsys.readouterr().out
    assert "no attribute 'calm'" in fails(capsys, *argv, "--json", "--attribute", "calm")
    assert "the rows are '0'" in fails(capsys, *argv[:5], "--json", "--rows", "0")


def test_tokenizers_come_from_files_too(tmp_path: Path) -> None:
    make_number_tokenizer().save_pretrained(tmp_path)
    alone = load_tokenizer(tmp_path / "tokenizer.json")
    assert alone("5 9 3", add_special_tokens=False).input_ids == [5, 9, 3]
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(tmp_path / "broken.json")


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the data beside the repository")
def test_sst2_is_met_better_than_by_soft_impute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R's softImpute 1.4-3 (als, λ = 1e-4, 100 iterations) reaches 0.0657 at rank 15 and 0.000631 at rank 127."""
    result = run_json(
        capsys,
        *("rank", "data", str(SHARED / "data/sentiment/sst2_train.tsv.gz"), "--text", "sentence", "--labels", "label"),
        *("--tokenizer", str(SHARED / "models/gpt2-tokenizer"), "--ranks", "15", "--iterations", "100"),
        *("--cache", str(tmp_path), "--save-matrix", str(tmp_path / "matrix.npz")),
    )
    assert result["omega2_value_sum"] == pytest.approx(31987.759287307515)
    assert result["table"][0]["mse"] <= 0.0657
    omega2 = RewardMatrix.load(tmp_path / "matrix.npz").omega2
    assert complete(omega2, 127, iterations=100).mse <= 0.000631
