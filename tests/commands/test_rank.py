"""The command `radq rank`: tables, JSON, and error messages of one line."""

import json
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_runs import fails
from families import make_byte_tokenizer, make_number_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import OPTConfig

from radq import numerics
from radq.cli import main
from radq.errors import ModelError
from radq.models.kinds import RadQ
from radq.rank.analysis import Backbone, RankResult, give_verdict
from radq.rank.completion import Factors, complete
from radq.rank.matrix import RewardMatrix
from radq.rank.numerical import SHARES
from radq.sources.model_source import ModelSource
from radq.toy import make_reviews


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
        *("omega2_value_sum", "table", "shuffled", "embedding_bound", "verdict", "verdict_code", "peak_memory"),
    }
    assert [row["rank"] for row in result["table"]] == [row["rank"] for row in result["shuffled"]] == [0, 2, 12, 30]
    assert result["table"][0].keys() >= {"rank", "mse", "mse_nm", "iterations", "seconds"}
    matrix = RewardMatrix.load(folder / "matrix.npz")
    omega2, shuffled = matrix.omega2, matrix.shuffled_omega2
    assert shuffled is not None
    assert result["table"][0]["mse"] == pytest.approx(np.mean(omega2.values**2))
    assert result["shuffled"][0]["mse"] == pytest.approx(np.mean(shuffled.values**2))
    size = omega2.shape[0] * omega2.shape[1]
    assert result["table"][1]["mse_nm"] == pytest.approx(result["table"][1]["mse"] * len(omega2) / size)
    assert result["table"][3]["mse"] < 1e-6 < result["table"][1]["mse"]
    bound = min(row["bound"] for row in result["table"] if row["bound"])
    assert f"rank {bound} at most" in result["verdict"]
    assert str(toy) in result["verdict"]
    assert result["verdict_code"] == "sparse"
    assert result["verdict"].startswith("cannot tell: too sparse")
    assert (result["embedding_bound"]["hidden_size"], result["embedding_bound"]["mse_omega2"]) == (32, 0.0)
    # the matrix is enough for a second look, which goes on from the certificates
    again = run_json(
        capsys, "rank", "data", str(folder / "matrix.npz"), "--ranks", "2", "--backbone", str(toy), *saved[2:]
    )
    assert again["table"][0]["mse"] <= result["table"][1]["mse"] * 1.001
    assert again["shuffled"][0]["mse"] == pytest.approx(result["shuffled"][1]["mse"], rel=1e-6)
    assert again["embedding_bound"] == result["embedding_bound"]
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
    assert "name a backbone with --backbone" in " ".join(captured.split())
    assert "peak memory" in captured


@pytest.fixture
def narrow(tmp_path: Path) -> Path:
    """A backbone over the numbers of `make_number_tokenizer` whose embeddings have four numbers each."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokenizer = make_number_tokenizer()
    sizes: Any = {"n_embd": 4, "n_layer": 1, "n_head": 1, "n_positions": 8, "bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(vocab_size=len(tokenizer), **sizes)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "narrow")
    tokenizer.save_pretrained(tmp_path / "narrow")
    return tmp_path / "narrow"


def write_products(file: Path, n: int, rank: int, noise: float = 0.0) -> None:
    """Texts of two numbers, all pairs of n, with two labels from products of the given rank."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2, n, rank)) @ rng.normal(size=(2, rank, n)) + noise * rng.normal(size=(2, n, n))
    lines = [f"{x + 3} {v + 3},{values[0, x, v]},{values[1, x, v]}\n" for x in range(n) for v in range(n)]
    file.write_text("text,a,b\n" + "".join(lines))


def test_frozen_embeddings_that_cost_something(
    tmp_path: Path, narrow: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_products(tmp_path / "products.csv", 12, rank=1)
    argv = ("rank", "data", str(tmp_path / "products.csv"), "--labels", "a,b", "--backbone", str(narrow))
    argv += ("--keep-labels",)  # products of rank 1, around 0
    result = run_json(capsys, *argv, "--ranks", "1,2,4,12")
    bound = result["embedding_bound"]
    assert result["attributes"] == [part["attribute"] for part in bound["attributes"]] == ["a", "b"]
    assert result["omega2_columns"] == 24
    assert result["verdict_code"] == "embeddings"
    assert result["verdict"].startswith(f"frozen embeddings cost at least {bound['mse_omega2']:.2g} over Ω_2")
    assert bound["costly_rows"] == 26  # twelve numbers and the empty prefix, for two labels
    assert {row["prefix"] for row in bound["rows"]} == {"", *map(str, range(3, 15))}
    assert main([*argv, "--ranks", "4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the empty prefix" in text
    assert "continuations" in text
    assert "add" in text


@pytest.mark.slow
def test_rank_is_no_obstacle_if_shuffled_labels_are_not_met(
    tmp_path: Path, narrow: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_products(tmp_path / "products.csv", 12, rank=1)
    argv = ("rank", "data", str(tmp_path / "products.csv"), "--tokenizer", str(narrow), "--ranks", "3,4,12")
    options = ("--penalty", "1e-7", "--tolerance", "1e-6")
    result = run_json(capsys, *argv, "--labels", "a", *options)
    assert result["verdict_code"] == "no-obstacle"
    assert result["verdict"].startswith("rank is no obstacle")
    assert result["embedding_bound"] is None
    assert "name a backbone with --backbone" in result["verdict"]
    # two attributes with hidden states of their own need a rank of their own each
    assert run_json(capsys, *argv, "--labels", "a,b", "--ranks", "2", *options)["verdict_code"] == "no-rank"
    write_products(tmp_path / "noise.csv", 12, rank=1, noise=1.0)
    noise = run_json(capsys, "rank", "data", str(tmp_path / "noise.csv"), *argv[3:], "--labels", "a", *options)
    assert noise["verdict_code"] == "sparse"


def test_the_first_verdict_that_holds_is_given(reviews: Path, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("rank", "data", str(reviews), "--labels", "praise", "--tokenizer", str(toy))
    file = reviews.parent / "matrix.npz"
    result = run_json(capsys, *argv, "--ranks", "0,1", "--save-matrix", str(file))
    assert "no rank tried reaches" in result["verdict"]
    assert result["verdict_code"] == "no-rank"
    matrix, tiny = RewardMatrix.load(file), Backbone("tiny", 16)
    assert len(matrix.omega2)

    def found(rank: int, mse: float) -> RankResult:
        return RankResult(rank, mse, mse, 5, 0.1, bound=rank + 1 if mse <= 1e-6 else None)

    verdict = give_verdict(matrix, [found(30, 1e-8)], [found(30, 1e-8)], 1e-6, tiny)
    assert verdict.code == "hidden-size"
    assert "more than the hidden size 16 of tiny" in verdict.text
    met = [found(2, 1e-3), found(4, 1e-8), found(8, 1e-9)]
    assert give_verdict(matrix, met, met, 1e-6, tiny).code == "sparse"
    nearly = [found(2, 1e-3), found(4, 5e-6), found(8, 1e-9)]
    assert give_verdict(matrix, met, nearly, 1e-6, tiny).code == "sparse"
    not_met = [found(2, 1e-2), found(4, 1e-3), found(8, 1e-9)]
    assert give_verdict(matrix, met, not_met, 1e-6, tiny).code == "no-obstacle"
    unknown = give_verdict(matrix, met, None, 1e-6, tiny)
    assert unknown.code == "unchecked"
    assert "Make it again" in unknown.text


def test_the_hidden_size_is_that_of_the_last_states(tmp_path: Path) -> None:
    """OPT-350m projects its hidden states to narrower ones before the output embedding."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    OPTConfig(**sizes).save_pretrained(tmp_path)
    assert Backbone.read(str(tmp_path)).hidden_size == 16


def test_matrices_of_earlier_versions_are_read(reviews: Path, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = reviews.parent / "matrix.npz"
    argv = ("rank", "data", str(reviews), "--labels", "praise", "--tokenizer", str(toy), "--ranks", "30")
    run_json(capsys, *argv, "--save-matrix", str(file))
    with np.load(file) as stored:
        old = {name: stored[name] for name in stored}
    for name in ("attributes", "weights", "contradictions", "omega2_prefixes", "shuffled", "vocabulary"):
        del old[name]
    np.savez(file, **old)
    result = run_json(capsys, "rank", "data", str(file), "--ranks", "30", "--backbone", str(toy))
    assert (result["shuffled"], result["embedding_bound"], result["verdict_code"]) == (None, None, "unchecked")
    assert "saved without its vocabulary" in result["verdict"]


def test_tokens_of_another_vocabulary_are_refused(
    reviews: Path, toy: Path, narrow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = reviews.parent / "matrix.npz"
    argv = ("rank", "data", str(reviews), "--labels", "praise", "--tokenizer", str(toy), "--ranks", "2")
    refused = fails(capsys, *argv, "--backbone", str(narrow), "--json")
    assert "are not those of the backbone" in refused
    run_json(capsys, *argv, "--backbone", str(toy), "--save-matrix", str(file))
    assert refused == fails(capsys, "rank", "data", str(file), "--backbone", str(narrow), "--json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (narrow / name).unlink()
    assert refused == fails(capsys, "rank", "data", str(file), "--backbone", str(narrow), "--json")


def test_without_two_continuations_the_rank_is_one(
    tmp_path: Path, toy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "one.csv").write_text("text,praise\nthe film was good,1\n")
    result = run_json(capsys, "rank", "data", str(tmp_path / "one.csv"), "--labels", "praise", "--tokenizer", str(toy))
    assert result["omega2_entries"] == 0
    assert result["table"] == []
    assert "rank 1" in result["verdict"]
    assert result["verdict_code"] == "sparse"


def test_mistakes_are_one_line(
    reviews: Path, toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = reviews.parent
    argv = ("rank", "data", str(reviews), "--json", "--labels", "praise", "--tokenizer", str(toy))
    assert "a tokenizer is needed" in fails(capsys, *argv[:6])
    assert "labels must name one column, or different ones, got ''" in fails(capsys, *argv[:4], "--tokenizer", str(toy))
    assert "got 'praise,praise'" in fails(capsys, *argv, "--labels", "praise,praise")
    assert "'text' has the words" in fails(capsys, *argv, "--labels", "praise,text")
    assert "whole numbers" in fails(capsys, *argv, "--ranks", "one")
    assert "got 100000" in fails(capsys, *argv, "--ranks", "100000")
    wrong = {
        ("penalty", "-0.0001"): "penalty must be more than 0, got -0.0001",
        ("penalty", "nan"): "penalty must be a finite number, got nan",
        ("iterations", "0"): "iterations must be at least 1 and at most 2,147,483,647, got 0",
        ("iterations", str(10**400)): "iterations must be",
        ("tolerance", "nan"): "tolerance must be a finite number, got nan",
        ("eps", "nan"): "eps must be a finite number, got nan",
        ("eps", "-1"): "eps must be at least 0, got -1",
        ("max-length", "0"): "max_length must be at least 1",
        ("seed", "-1"): "seed must be at least 0 and at most 9,223,372,036,854,775,807, got -1",
    }
    for (option, value), problem in wrong.items():
        assert problem in fails(capsys, *argv, "--ranks", "2", f"--{option}", value)
    assert "there is no folder" in fails(capsys, *argv[:6], "--tokenizer", "./nowhere")
    (folder / "bad.csv").write_text("text,praise\nthe film was good,inf\n")
    assert "'praise' must be a finite number or a word, got 'inf'" in fails(
        capsys, "rank", "data", str(folder / "bad.csv"), *argv[3:]
    )
    assert "reward matrix" in fails(capsys, "rank", "verify", str(reviews), str(reviews))
    saved = ("--save-matrix", str(folder / "m.npz"), "--certificates", str(folder / "c"))
    run_json(capsys, *argv[:3], *argv[4:], "--ranks", "2", *saved)
    matrix = RewardMatrix.load(folder / "m.npz")
    Factors(torch.zeros(3, 2), torch.zeros(4, 2)).save(folder / "other.safetensors", matrix.omega2)
    assert "does not belong" in fails(
        capsys, "rank", "verify", str(folder / "m.npz"), str(folder / "other.safetensors")
    )
    monkeypatch.setattr(numerics, "available_memory", lambda device="cpu": 1000)
    assert "takes" in fails(capsys, *argv, "--ranks", "2")


def test_weights_that_count_nothing_are_one_line(
    tmp_path: Path, toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "zero.csv").write_text("text,praise,weight\nthe film was good,1,0\nthe film was bad,0,0\n")
    argv = ("rank", "data", str(tmp_path / "zero.csv"), "--labels", "praise", "--tokenizer", str(toy))
    assert "weight" in fails(capsys, *argv, "--weight", "weight", "--json")


WORDS = ["", " ", "nan", "inf", "-1", "0", "1e400", "1.5", "-0", "9" * 30, "1,2", ",", "é", "/", ".", "/dev/full"]
VALUES = st.sampled_from(WORDS) | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
DATA_OPTIONS = (
    *("labels", "tokenizer", "backbone", "ranks", "eps", "iterations", "penalty", "tolerance", "text", "prompt"),
    *("weight", "max-length", "cache", "save-matrix", "certificates", "seed", "device", "dtype"),
)
MODEL_OPTIONS = ("data", "text", "attribute", "rows", "batch-size", "out", "cache", "seed", "device", "dtype")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_typed_ends_well_or_in_one_line(
    data: st.DataObject, files: tuple[Path, Path], toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reviews, reward = files
    matrix, factors = (str(reviews.parent / name) for name in ("m.npz", "rank-2.safetensors"))
    start = {
        "data": ["data", str(reviews), "--labels", "praise", "--tokenizer", str(toy), "--ranks", "2"],
        "model": ["model", str(reward), "--data", str(reviews), "--rows", "4"],
        "verify": ["verify", matrix, factors],
        "matrix": ["data", matrix, "--ranks", "2"],
    }[data.draw(st.sampled_from(["data", "model", "verify", "matrix"]))]
    argv = list(start)
    if start[0] == "verify" or data.draw(st.integers(0, 9)) == 0:  # files
        argv[data.draw(st.integers(1, 2 if start[0] == "verify" else 1))] = data.draw(VALUES)
    if start[0] == "data" and data.draw(st.booleans()):
        argv += ["--label-range", data.draw(VALUES), data.draw(VALUES)]
    options = {"data": DATA_OPTIONS, "model": MODEL_OPTIONS, "verify": ()}[start[0]]
    for option in data.draw(st.lists(st.sampled_from(options), max_size=2)) if options else ():
        argv += [f"--{option}", data.draw(VALUES)]
    with chdir(reviews.parent):
        try:
            status = main(["rank", *argv, "--json"])
        except SystemExit as exit_:  # what tyro refuses
            status = exit_.code
    captured = capsys.readouterr()
    assert status in (0, 2), argv
    assert "Traceback" not in captured.err
    if status == 2 and captured.err.startswith("error:"):
        assert captured.err.count("\n") == 1, argv
        assert "hint: " in captured.err, argv


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> tuple[Path, Path]:
    """Reviews and a reward model, beside a matrix and a certificate of the reviews."""
    folder = tmp_path_factory.mktemp("typed")
    lines = "".join(f'"{text}",{praise}\n' for text, praise in make_reviews(40))
    (folder / "reviews.csv").write_text("text,praise\n" + lines)
    RadQ.from_backbone(toy, attributes=["praise"]).save_pretrained(folder / "reward")
    argv = ["rank", "data", str(folder / "reviews.csv"), "--labels", "praise", "--tokenizer", str(toy), "--ranks", "2"]
    saved = ["--save-matrix", str(folder / "m.npz"), "--certificates", str(folder), "--cache", str(folder / "cache")]
    assert main([*argv, *saved, "--json"]) == 0
    return folder / "reviews.csv", folder / "reward"


def test_model_draws_ranks(
    reviews: Path, toy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    for row in result["ranks"]:
        assert {one["share"]: one["count"] for one in row["counts"]} == {
            share: sum(value > share * row["spectrum"][0] for value in row["spectrum"]) for share in SHARES
        }
    assert result["tf32"] is False
    assert main([*argv]) == 0
    out = capsys.readouterr().out
    assert all(text in " ".join(out.split()) for text in ("cutoff", "0.01", "1e-06", "Another cutoff gives another"))
    last = next(line for line in out.splitlines() if line.strip("│ ").startswith("64"))
    assert [int(cell) for cell in last.split("│")[5:-1]] == [one["count"] for one in result["ranks"][-1]["counts"]]
    assert "TF32" not in out
    assert "no attribute 'calm'" in fails(capsys, *argv, "--json", "--attribute", "calm")
    assert "rows must be numbers of at least 1, got '0'" in fails(capsys, *argv[:5], "--json", "--rows", "0")
    monkeypatch.setattr(numerics, "available_memory", lambda device="cpu": 1000)
    assert "rewards and its factorisation takes" in fails(capsys, *argv, "--json")


def test_tokenizers_come_from_files_too(tmp_path: Path) -> None:
    make_number_tokenizer().save_pretrained(tmp_path)
    alone = ModelSource.find(tmp_path / "tokenizer.json").tokenizer
    assert alone("5 9 3", add_special_tokens=False).input_ids == [5, 9, 3]
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer"):
        _ = ModelSource.find(tmp_path / "broken.json").tokenizer


SST2 = ("--text", "sentence", "--labels", "label")


def test_an_excerpt_of_sst2_has_a_rank(excerpts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every prefix with several continuations is a row of Ω_2, and 15 factors meet so few rows exactly."""
    result = run_json(
        capsys,
        *(
            "rank",
            "data",
            str(excerpts / "sst2.tsv"),
            *SST2,
            "--tokenizer",
            str(make_byte_tokenizer(tmp_path / "bytes")),
        ),
        *("--ranks", "0,15", "--iterations", "100", "--cache", str(tmp_path)),
        *("--save-matrix", str(tmp_path / "matrix.npz")),
    )
    omega2 = RewardMatrix.load(tmp_path / "matrix.npz").omega2
    assert (result["utterances"], result["omega2_rows"]) == (50, omega2.shape[0])
    assert result["omega2_value_sum"] == pytest.approx(omega2.values.sum())
    assert result["table"][1]["mse"] <= 1e-6 < result["table"][0]["mse"]


@pytest.mark.slow
def test_sst2_is_met_better_than_by_soft_impute(
    shared_file: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R's softImpute 1.4-3 (als, λ = 1e-4, 100 iterations) reaches 0.0657 at rank 15 and 0.000631 at rank 127."""
    result = run_json(
        capsys,
        *("rank", "data", str(shared_file("data/sentiment/sst2_train.tsv.gz")), *SST2),
        *("--tokenizer", str(shared_file("models/gpt2-tokenizer")), "--ranks", "15", "--iterations", "100"),
        *("--cache", str(tmp_path), "--save-matrix", str(tmp_path / "matrix.npz")),
    )
    assert result["omega2_value_sum"] == pytest.approx(31987.759287307515)
    assert result["table"][0]["mse"] <= 1e-6  # a solver that stops early is at 1.3e-6
    omega2 = RewardMatrix.load(tmp_path / "matrix.npz").omega2
    assert complete(omega2, 127, iterations=100).mse <= 0.000631
