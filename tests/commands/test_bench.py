"""The benchmark measures every variant, compares it with no guide, and says what it left out."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from command_runs import fails
from tiny_shape import TINY
from transformers import AutoConfig

from radq.benchmark import measure as measuring
from radq.benchmark.config import GUIDE_NAMES, SHAPES, BenchConfig, Grid, Point
from radq.benchmark.guides import GUIDES, make_random_lm
from radq.benchmark.measure import BenchResult, Spread, Variant, summarise
from radq.benchmark.plot import plot_bench
from radq.cli import main
from radq.decoding.decoder import Decoder
from radq.decoding.request import Request
from radq.errors import OptionError
from radq.models.kinds import RadQ, RadV

pytestmark = pytest.mark.slow

SMALL = "--top-k 4 2 0 --rows 2 1 --prompt-tokens 5 9 --new-tokens 2 --rounds 2".split()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return "tiny"


def bench(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["bench", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- results ---


def test_every_guide_is_measured_at_every_point(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = bench(capsys, "--lm", tiny, *SMALL, "--out", str(tmp_path / "out"))
    points = [(2, 4, 5), (2, 2, 5), (2, None, 5), (1, 4, 5), (2, 4, 9)]
    measured = {(one["rows"], one["top_k"], one["prompt_tokens"], one["guide"]) for one in document["timings"]}
    left_out = {(one["rows"], one["top_k"], one["prompt_tokens"], one["guide"]) for one in document["left_out"]}
    assert left_out == {(2, None, 5, "naive-v")}  # 40 forwards
    assert measured | left_out == {(*point, guide) for point in points for guide in GUIDE_NAMES}
    assert len(document["timings"]) == len(measured)
    for one in document["timings"]:
        assert not one["captured"]
        for spread in (one["ratio"], one["milliseconds"]):
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        if one["guide"] == "none":
            assert one["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert (document["dtype"], document["vocab_size"], document["rounds"]) == ("float32", 40, 2)
    files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert files.keys() == {"bench.json", "bench.svg", "bench.png"}
    assert json.loads(files["bench.json"]) == document
    assert b"RAD-V naive" in files["bench.svg"]
    assert files["bench.png"].startswith(b"\x89PNG")


def test_ratios_are_printed_before_milliseconds(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["bench", "--lm", tiny, *SMALL, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert 0 < said.index("multiples of unguided") < said.index("milliseconds per token")
    assert all(guide.title in said for guide in GUIDES.values())
    assert "not measured: RAD-V naive, rows 2, k all: a step would take 40 forwards" in said
    assert str(tmp_path / "bench.svg") in said
    again = ["bench", "--lm", tiny, *SMALL, "--guides", "q", "--out", str(tmp_path)]
    assert main(again) == 0  # a folder of an earlier benchmark may be replaced


def test_ratios_are_those_of_a_round_and_medians_those_of_all() -> None:
    point = Point(rows=1, top_k=None, prompt_tokens=3)
    none, q = (Variant(**vars(point), guide=guide, captured=False) for guide in ("none", "q"))
    unguided, guided = summarise({none: [0.001, 0.004, 0.002], q: [0.002, 0.012, 0.003]})
    assert unguided.ratio == Spread(1.0, 1.0, 1.0)
    assert unguided.milliseconds == Spread(2.0, 1.5, 3.0)
    assert guided.ratio == Spread(2.0, 1.75, 2.5)  # of 2, 3 and 1.5
    assert guided.milliseconds.median == 3.0
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0)


def test_the_points_are_lines_through_the_first_numbers() -> None:
    grid = Grid(top_k=(20, 0), rows=(25, 1), prompt_tokens=(32, 512), new_tokens=3)
    assert grid.points == [Point(25, 20, 32), Point(25, None, 32), Point(1, 20, 32), Point(25, 20, 512)]


def test_a_kl_budget_is_measured(toy: Path) -> None:
    """Only guided steps have one; a budget of 0 steers nothing."""
    config = BenchConfig(lm=str(toy), guides=["q"], top_k=[5], rows=[2], rounds=1, new_tokens=2, kl_budget=0.0)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "Request", lambda *parts: found.append(parts[1].kl_budget) or Request(*parts))
        result = measuring.measure(config, "cpu")
    assert set(found) == {0.0}
    assert [(timing.guide, timing.kl_budget) for timing in result.timings] == [("none", 0.0), ("q", 0.0)]
    with pytest.raises(OptionError, match="kl_budget must be"):
        replace(config, kl_budget=-1.0).check()


def test_captured_steps_have_lines_of_their_own() -> None:
    every = product(GUIDES, (4, None), (False, True))
    timings = summarise({Variant(2, k, 3, guide=guide, captured=captured): [0.001] for guide, k, captured in every})
    drawing = plot_bench(BenchResult("lm", None, "GPU", "cuda", "bfloat16", "2", 40, 2, 3, timings, [])).svg
    assert "RAD-Q, captured" in drawing
    assert "GeDi, captured" in drawing


# --- models ---


@pytest.mark.parametrize(("kind", "model"), [("q", RadQ), ("v", RadV)])
def test_a_reward_model_of_your_own(
    kind: str, model: Any, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.from_backbone(toy, attributes=["praise", "calm"]).save_pretrained(tmp_path / "reward")
    argv = ["--lm", str(toy), "--reward", str(tmp_path / "reward"), *SMALL, "--rounds", "1"]
    document = bench(capsys, *argv)
    assert {one["guide"] for one in document["timings"]} == {*GUIDE_NAMES}


def test_random_models_have_the_data_type_from_the_start() -> None:
    lm = make_random_lm(AutoConfig.for_model(TINY.family, **TINY.shared, **TINY.lm), "cpu", torch.bfloat16)
    assert {weight.dtype for weight in lm.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_configurations(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        configs = [AutoConfig.for_model(shape.family, **shape.shared, **own) for own in (shape.lm, shape.reward)]
    assert configs[0].vocab_size == configs[1].vocab_size == shape.vocab_size
    assert configs[0].num_hidden_layers > configs[1].num_hidden_layers


def test_full_memory_leaves_a_guide_out(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = Decoder.draw

    def draw_or_fail(self: Decoder, *arguments: Any) -> Any:
        if self.guide is not None and self.count > 1:
            raise torch.OutOfMemoryError("no room")
        return draw(self, *arguments)

    monkeypatch.setattr(Decoder, "draw", draw_or_fail)
    document = bench(capsys, "--lm", tiny, *SMALL, "--guides", "q")
    assert {one["reason"] for one in document["left_out"]} == {"the memory is full"}
    assert [one["rows"] for one in document["timings"] if one["guide"] == "q"] == [1]
    assert len([one for one in document["timings"] if one["guide"] == "none"]) == 5


# --- mistakes ---


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--top-k", "41"], "at most 40"),
        (["--top-k", "-1"], "top_k must be at least 0"),
        (["--rows", "0"], "rows must be at least 1"),
        (["--rows", str(2**31 - 1)], "memory"),
        (["--prompt-tokens", "0"], "prompt_tokens must be at least 1"),
        (["--prompt-tokens", "64"], "64 positions"),
        (["--new-tokens", "0"], "new_tokens must be at least 1"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--guides", "q", "rad-q"], "choose from none, q"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], said: str, tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_work(*arguments: Any) -> float:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(measuring, "time_variant", no_work)
    assert said in fails(capsys, "bench", "--lm", tiny, *argv)


def test_an_interrupted_benchmark_keeps_whole_rounds(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure_one, runs = measuring.time_variant, []

    def interrupt(*arguments: Any) -> float | None:
        runs.append(arguments)
        if len(runs) == 6:  # two variants, and a first round that only warms up: one round is whole
            raise KeyboardInterrupt
        return measure_one(*arguments)

    monkeypatch.setattr(measuring, "time_variant", interrupt)
    options = "--guides q --top-k 4 --rows 1 --prompt-tokens 5 --new-tokens 2 --rounds 3".split()
    assert bench(capsys, "--lm", tiny, *options)["rounds"] == 1


def test_results_go_into_a_folder_of_their_own(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file" in fails(capsys, "bench", "--lm", tiny, "--out", str(tmp_path / "file"))
    assert "holds other files" in fails(capsys, "bench", "--lm", tiny, "--out", str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_lists_that_are_left_out_depend_on_the_device() -> None:
    assert BenchConfig().choose_grid("cpu", 50).top_k == (20, 5, 0)  # no more candidates than tokens
    found = BenchConfig(top_k=[3, 3, 0], kl_budget="none").choose_grid("cuda:1", 50)
    assert found == Grid((3, 0), (25, 1, 100, 400), (32, 512), 16)
