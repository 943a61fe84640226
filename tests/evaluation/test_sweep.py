"""Sweeps: what YAML means, what a killed one leaves behind, and numbers that another computation gives too."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from chat_servers import faking, read_text, say
from classifiers import make_classifier
from command_runs import fails
from hypothesis import given
from hypothesis import strategies as st
from kills import run_and_kill
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from radq import RewardGuide, best_of_n, generate
from radq.cli import main
from radq.decoding.decoder import Decoder
from radq.errors import DataError, OptionError
from radq.evaluation.metrics import mauve
from radq.evaluation.sweep.config import GuideSweep, PromptFile, Sweep, SweepCell, find_changes, load_sweep
from radq.evaluation.sweep.folder import FINGERPRINTS, read_costs
from radq.files import drop_partial_last_line, read_lines
from radq.judges.readers import load_encoder
from radq.models.kinds import RadQ, RadV
from radq.models.reward import RewardModel
from radq.settings import exact

PROMPTS = ["the film was", "the plot", "this movie is", "a story of love", "the acting", "it was"]


SMALL_BATCHES = {  # so that the texts of a cell fill several
    "radq.judges.readers:BATCH_SIZE": 3,
    "radq.judges.models:BATCH_SIZE": 3,
    "radq.judges.readers:TransformersReader.group_size": 7,
}


@pytest.fixture(scope="module", autouse=True)
def small_batches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for place, value in SMALL_BATCHES.items():
            patch.setattr(place.replace(":", "."), value)
        yield


@pytest.fixture(scope="module")
def world(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of two classes, two reward models and a judge."""
    folder = tmp_path_factory.mktemp("world")
    for group, some in (("short", PROMPTS[:4]), ("long", PROMPTS[4:])):
        rows = "".join(json.dumps({"prompt": {"text": text}}) + "\n" for text in some)
        (folder / f"{group}.jsonl").write_text(rows)
    torch.manual_seed(0)
    RadQ.from_backbone(toy, attributes=["praise"]).save_pretrained(folder / "q")
    RadV.from_backbone(toy, attributes=["praise"]).save_pretrained(folder / "v")
    make_classifier(folder / "judge")
    return folder


def describe(world: Path, toy: Path, **changes: Any) -> dict[str, Any]:
    return {
        "base": str(toy),
        "prompts": [{"file": str(world / "short.jsonl")}, {"file": str(world / "long.jsonl")}],
        "guides": {
            "rad-q": {"folder": str(world / "q"), "weights": {"praise": 1}, "beta": [5, 20]},
            "rad-v": {"folder": str(world / "v"), "weights": {"praise": -1}, "beta": [5, 20]},
            "best": {"folder": str(world / "q"), "weights": {"praise": 1}, "best_of": [3]},
        },
        "judges": {"mood": {"judge": f"classifier:{world / 'judge'}", "metrics": ["avg_max", "positive_rate"]}},
        "perplexity": str(toy),
        "metrics": ["perplexity", "dist_2"],
        "samples": 4,
        "max_new_tokens": 4,
        "top_k": 8,
        "kl_budget": None,
        "batch_size": 8,
        "resamples": 50,
    } | changes


@pytest.fixture
def write(world: Path, toy: Path, tmp_path: Path) -> Any:
    def write_sweep(**changes: Any) -> str:
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(describe(world, toy, **changes)))
        return str(tmp_path / "sweep.yaml")

    return write_sweep


@pytest.fixture(scope="module")
def run(world: Path, toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "sweep.yaml").write_text(yaml.safe_dump(describe(world, toy)))
    argv = ["eval", "--config", str(folder / "sweep.yaml"), "--out", str(folder / "run"), "--cache", str(folder / "c")]
    assert main([*argv, "--json"]) == 0
    return folder / "run"


# --- the order of work ---


def test_cells_are_all_settings_once_and_unguided_first() -> None:
    guide = GuideSweep("q", {"praise": -2.0}, beta=[1.0, 2.5, 10.0])
    assert guide.at(2.5).numbers == {"praise": -5.0}
    sweep = Sweep(
        "base", [PromptFile("p")], {"rad-q": guide}, top_k=[20, 40], kl_budget=[None, 0.5], seeds=[0, 1], metrics=[]
    )
    cells = sweep.cells()
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) == 4 + 2 * 2 * 2 * 3
    assert names[:4] == ["none k=20 seed=0", "none k=20 seed=1", "none k=40 seed=0", "none k=40 seed=1"]
    assert "rad-q β=2.5 k=40 kl=0.5 seed=1" in names
    assert {cell.reference.name for cell in cells} == set(names[:4])
    best = GuideSweep("q", {"praise": 1.0}, best_of=[3])
    assert Sweep("base", [PromptFile("p")], {"best": best}, metrics=[]).cells()[1].name == "best n=3 k=20 seed=0"


def test_the_papers_sweeps_are_whole() -> None:
    for name, cells in (("detox", 2 * (1 + 3 * 7 + 5)), ("sentiment", 2 * (1 + 3 * 6))):
        sweep = load_sweep(Path(__file__).parents[2] / f"recipes/sweeps/{name}.yaml")
        assert len(sweep.cells()) == cells
        assert (sweep.samples, sweep.max_new_tokens, sweep.top_k) == (25, 20, [20, 40])
        assert sweep.kl_budget == [None]


def test_yaml_numbers_and_single_items(write: Any) -> None:
    sweep = load_sweep(write(temperature="1e-1", top_k=None, seeds=3))
    assert (sweep.temperature, sweep.top_k, sweep.seeds) == (0.1, [None], [3])
    assert sweep.guides["rad-q"].beta == [5.0, 20.0]
    assert len(sweep.read_prompts()) == 6


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gides": {}}, "sets 'gides', which is no option"),
        ({"metrics": ["perplexty"]}, "no metric 'perplexty'"),
        ({"metrics": ["avg_max"]}, "'avg_max' under 'metrics' needs a judge"),
        ({"metrics": ["perplexity"], "perplexity": None}, "no model to measure it"),
        ({"metrics": ["kl"], "perplexity": "gpt2-xl"}, "kl is measured while decoding"),
        ({"judges": {"j": {"judge": "x", "metrics": ["dist_2"]}}}, "'dist_2' under the judge 'j' needs no judge"),
        (
            {"judges": {"j": {"judge": "x", "metrics": ["avg_max"], "reads": "all"}}},
            "reads must be one of continuation, text",
        ),
        ({"guides": {"none": {"folder": "q", "weights": {"a": 1}, "beta": 1}}}, "must not be called 'none'"),
        ({"guides": {"../x": {"folder": "q", "weights": {"a": 1}, "beta": 1}}}, "must not be called '../x'"),
        ({"guides": {"g": {"folder": "q", "weights": {"a": 1}}}}, "either beta or best_of"),
        (
            {"guides": {"g": {"folder": "q", "weights": {"a": "much"}, "beta": 1}}},
            "weights: a must be a finite number, got 'much'",
        ),
        ({"guides": {"g": {"weights": {"a": 1}, "beta": 1}}}, "has no 'folder'"),
        ({"samples": 0}, "samples must be at least 1.*got 0"),
        ({"seeds": [1, 1]}, "seeds must be different values, got 1 twice"),
        ({"kl_budget": [None, None]}, "kl_budget must be different values, got None twice"),
        (
            {"guides": {"g": {"folder": "q", "weights": {"a": 1}, "beta": [1, 1.0]}}},
            "beta of guide 'g' must be different values, got 1 twice",
        ),
        ({"seeds": []}, "seeds must have at least one item"),
        ({"samples": True}, "must be a whole number"),
        ({"samples": 2.5}, "must be a whole number"),
        ({"max_new_tokens": float("inf")}, "must be a whole number"),
        ({"kl_budget": float("inf")}, "kl_budget must be a finite number, got inf"),
        ({"resamples": 10**12}, "resamples must be at least 1 and at most 1,000,000"),
    ],
)
def test_mistakes_in_the_file(write: Any, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        load_sweep(write(**changes))


def test_mistakes_show_before_the_work(
    write: Any, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("eval", "--json", "--out", str(tmp_path / "run"), "--config")
    judge = {"j": {"judge": "oracle:x", "metrics": ["avg_max"]}}
    assert "classifier, onnx" in fails(capsys, *argv, write(judges=judge)).replace(":", "")
    shutil.rmtree(tmp_path / "run")
    guide = {"g": {"folder": str(world / "q"), "weights": {"calm": 1}, "beta": 1}}
    assert "no attribute 'calm'" in fails(capsys, *argv, write(guides=guide))
    assert not (tmp_path / "run").exists()
    assert "'./nowhere'" in fails(capsys, *argv, write(perplexity="./nowhere"))
    assert not (tmp_path / "run/generations.jsonl").exists()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "other.jsonl").write_text('{"question": "why"}\n')
    assert "question" in fails(capsys, *argv, write(prompts=[{"file": str(tmp_path / "other.jsonl")}]))
    assert "cannot read" in fails(capsys, *argv, str(tmp_path / "nowhere.yaml"))


def test_another_sweep_is_refused_and_named(
    run: Path, write: Any, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "generations.jsonl").read_bytes()
    guides = {"rad-q": {"folder": str(world / "q"), "weights": {"praise": 1}, "beta": [5, 50]}}
    error = fails(capsys, "eval", "--json", "--out", str(run), "--config", write(samples=5, guides=guides))
    assert "samples: 4 → 5" in error
    assert "guides.rad-q.beta: [5.0, 20.0] → [5.0, 50.0]" in error
    assert (run / "generations.jsonl").read_bytes() == before
    assert list(find_changes({"a": {"b": 1}}, {"a": {"b": 1}})) == []


# --- what a run holds ---


def test_generations_are_those_of_generate(
    run: Path, world: Path, toy_lm: PreTrainedModel, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = list(read_lines(run / "generations.jsonl"))
    assert [row["text"] for row in rows[:6]] == PROMPTS
    assert [row["group"] for row in rows[:6]] == ["short"] * 4 + ["long"] * 2
    model = RadQ.from_pretrained(world / "q")
    options: dict[str, Any] = {"top_k": 8, "max_new_tokens": 4, "samples": 4, "kl_budget": None}
    expected = {
        "none k=8 seed=0": generate(toy_lm, toy_tokenizer, PROMPTS, **options),
        "rad-q β=20 k=8 seed=0": generate(
            toy_lm, toy_tokenizer, PROMPTS, RewardGuide(model, {"praise": 20.0}), **options
        ),
        "best n=3 k=8 seed=0": best_of_n(toy_lm, toy_tokenizer, PROMPTS, model, {"praise": 1.0}, 3, **options),
    }
    for cell, generations in expected.items():
        found = [text for row in rows if row["cell"] == cell for text in row["continuations"]]
        assert found == [generation.text for generation in generations]


def test_metrics_are_those_of_an_independent_computation(
    run: Path, toy_lm: PreTrainedModel, toy_tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = {(row["cell"], row["group"]): row for row in read_lines(run / "metrics.jsonl")}
    assert len(rows) == 6 * 2
    generations = [row for row in read_lines(run / "generations.jsonl") if row["cell"] == "rad-v β=5 k=8 seed=0"]
    perplexities = []
    for row in (row for row in generations if row["group"] == "long"):
        for text in row["continuations"]:
            if not text.strip():
                continue
            begin = len(toy_tokenizer(row["text"]).input_ids)
            ids = torch.tensor([toy_tokenizer(row["text"] + text).input_ids])
            with torch.no_grad():
                log_probabilities = toy_lm(ids).logits.double().log_softmax(-1)[0]
            nll = [-log_probabilities[t - 1, ids[0, t]].item() for t in range(begin, ids.shape[1])]
            perplexities.append(np.exp(np.mean(nll)))
    found = rows["rad-v β=5 k=8 seed=0", "long"]["metrics"]
    assert found["perplexity"]["value"] == pytest.approx(np.mean(perplexities), rel=1e-4)
    scores = np.load(run / "measures/rad-v β=5 k=8 seed=0.npz")["scores[mood]"]
    assert scores.shape == (6, 4)
    assert found["avg_max[mood]"]["value"] == pytest.approx(np.nanmax(scores[4:], axis=1).mean())


def test_a_language_model_judges_by_a_rubric(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its scores are mapped to 0 to 1, and texts that it does not score are left out."""
    (tmp_path / "rubric.md").write_text("How long is it? Scale: 1 to 5")
    use = {"judge": f"openai:m#{tmp_path / 'rubric.md'}", "metrics": ["avg_max"]}
    config = write(guides={}, judges={"llm": use}, metrics=[], perplexity=None)
    argv = ["eval", "--config", config, "--out", str(tmp_path / "run"), "--cache", str(tmp_path / "cache"), "--json"]

    def grade(text: str) -> int | None:
        return None if len(text) % 7 == 0 else len(text) % 5 + 1

    with faking(lambda number, body: say(str(grade(read_text(body))))) as (_, address):
        monkeypatch.setenv("OPENAI_BASE_URL", address)
        assert main(argv) == 0
    texts = [(row["group"], row["continuations"]) for row in read_lines(tmp_path / "run" / "generations.jsonl")]
    for row in read_lines(tmp_path / "run" / "metrics.jsonl"):
        scores = [[grade(text) for text in some if text.strip()] for group, some in texts if group == row["group"]]
        known = [[(score - 1) / 4 for score in some if score is not None] for some in scores]
        assert row["metrics"]["avg_max[llm]"]["value"] == pytest.approx(np.mean([max(some) for some in known if some]))
    assert None in [grade(text) for _, some in texts for text in some]
    (tmp_path / "rubric.md").write_text("How short is it? Scale: 1 to 5")
    monkeypatch.setenv("OPENAI_BASE_URL", address)
    assert "changed since: the judge 'llm'" in fails(capsys, *argv)


def test_changes_are_those_from_the_unguided_cell(run: Path) -> None:
    rows = {(row["cell"], row["group"]): row for row in read_lines(run / "metrics.jsonl")}
    assert {(row["group"], row["prompts"], row["samples"]) for row in rows.values()} == {
        ("short", 4, 4),
        ("long", 2, 4),
    }
    for (cell, group), row in rows.items():
        if row["guide"] == "none":
            assert row["changes"] == {}
            continue
        unguided = rows["none k=8 seed=0", group]["metrics"]
        assert row["changes"].keys() == row["metrics"].keys(), cell
        for name, change in row["changes"].items():
            assert change["value"] == pytest.approx(row["metrics"][name]["value"] - unguided[name]["value"], abs=1e-9)
            assert change["low"] <= change["high"]


def test_the_console_leads_with_models_prompts_and_changes(
    run: Path, world: Path, toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["eval", "--config", str(run.parent / "sweep.yaml"), "--out", str(run), "--cache", str(run.parent / "c")]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        f"base model: {toy}",
        f"judge: mood = classifier:{world / 'judge'}, reads continuations alone",
        f"perplexity under: {toy}",
        "prompts: 4 short prompts, 2 long prompts, 4 samples of each",
        "guides: none, best, rad-q, rad-v",
    ]
    assert all(" avg_max[mood] from " in line and "too few" in line for line in lines[5:11])
    assert not any("…" in line for line in lines)
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["metrics"] == list(read_lines(run / "metrics.jsonl"))
    assert document["costs"] == read_costs(run)
    assert document["run"]["base model"] == str(toy)
    assert {change["guide"] for change in document["changes"]} == {"rad-q", "rad-v", "best"}


def test_perplexity_while_decoding_is_that_of_the_base(run: Path, write: Any, tmp_path: Path) -> None:
    sweep = write(perplexity="base", metrics=["perplexity", "dist_2", "kl"])
    argv = ["eval", "--config", sweep, "--out", str(tmp_path / "run"), "--cache", str(tmp_path)]
    assert main([*argv, "--json"]) == 0
    pairs = [(row["axis"], row["first"], row["second"]) for row in read_lines(tmp_path / "run/differences.jsonl")]
    assert {axis for axis, *_ in pairs} == {"perplexity", "kl"}
    assert len(pairs) == 2 * len(list(read_lines(run / "differences.jsonl")))
    changes = {row["cell"]: row["changes"].get("kl") for row in read_lines(tmp_path / "run/metrics.jsonl")}
    assert changes["rad-q β=20 k=8 seed=0"]["value"] > changes["rad-q β=5 k=8 seed=0"]["value"]
    theirs, ours = (list(read_lines(folder / "metrics.jsonl")) for folder in (run, tmp_path / "run"))
    for expected, actual in zip(theirs, ours, strict=True):
        for name in ("value", "low", "high"):
            wanted = expected["metrics"]["perplexity"][name]
            assert actual["metrics"]["perplexity"][name] == pytest.approx(wanted, rel=1e-4)


def test_costs_are_the_papers(run: Path) -> None:
    costs = read_costs(run)
    assert costs["none k=8 seed=0"]["expert_tokens_per_token"] == 0
    last_is_not_read = pytest.approx(3 / 4, abs=0.05)
    assert costs["rad-q β=5 k=8 seed=0"]["expert_tokens_per_token"] == last_is_not_read
    assert costs["rad-v β=5 k=8 seed=0"]["expert_tokens_per_token"] == pytest.approx(8, abs=0.1)
    assert costs["rad-v β=5 k=8 seed=0"]["calls_per_token"] == pytest.approx(1, abs=0.1)
    assert "expert_tokens_per_token" not in costs["best n=3 k=8 seed=0"]  # which is not known, rather than 0
    assert all(cost["tokens_per_second"] > 0 and cost["peak_memory"] > 0 for cost in costs.values())


def test_pairs_of_guides_are_compared(run: Path) -> None:
    rows = list(read_lines(run / "differences.jsonl"))
    pairs = {(row["first"], row["second"], row["metric"], row["group"]) for row in rows}
    assert ("rad-q", "rad-v", "avg_max[mood]", "short") in pairs
    assert len(rows) == 3 * 2 * 2
    reasons = {row["reason"] for row in rows if row["second"] == "best"}
    assert all(reason is not None for reason in reasons)  # one strength makes no curve


def test_mauve_of_the_unguided_cell_is_one(write: Any, world: Path, tmp_path: Path) -> None:
    make_classifier(tmp_path / "encoder", kind="encoder")
    sweep = write(metrics=["mauve"], mauve=str(tmp_path / "encoder"), guides={}, samples=8, judges={})
    argv = ["eval", "--json", "--config", sweep, "--out", str(tmp_path / "run")]
    assert main([*argv[:2], "--only-generate", *argv[2:]]) == 0
    assert not (tmp_path / "run/metrics.jsonl").exists()
    (tmp_path / "run/metrics.jsonl").write_text('{"cell": "none')  # as a kill leaves it
    assert main(argv) == 2  # eight samples of two prompts are too few for it
    (tmp_path / "run/metrics.jsonl").unlink()
    one = [{"file": str(world / name), "group": "all"} for name in ("short.jsonl", "long.jsonl")]
    sweep = write(metrics=["mauve"], mauve=str(tmp_path / "encoder"), guides={}, samples=8, judges={}, prompts=one)
    assert main([*argv, "--overwrite"]) == 0
    (row,) = read_lines(tmp_path / "run/metrics.jsonl")
    assert row["metrics"]["mauve"]["value"] == 1.0


def test_mauve_of_a_second_unguided_seed_is_that_against_the_first(write: Any, world: Path, tmp_path: Path) -> None:
    make_classifier(tmp_path / "encoder", kind="encoder")
    one = [{"file": str(world / name), "group": "all"} for name in ("short.jsonl", "long.jsonl")]
    guides = {"rad-q": {"folder": str(world / "q"), "weights": {"praise": 1}, "beta": [0]}}
    options = {"metrics": ["mauve", "repetition"], "mauve": str(tmp_path / "encoder"), "judges": {}, "prompts": one}
    sweep = write(guides=guides, samples=8, seeds=[3, 1], **options)
    assert main(["eval", "--json", "--config", sweep, "--out", str(tmp_path / "run")]) == 0
    rows = {row["cell"]: row["metrics"] for row in read_lines(tmp_path / "run/metrics.jsonl")}
    texts: dict[str, list[list[str]]] = {}
    for row in read_lines(tmp_path / "run/generations.jsonl"):
        texts.setdefault(row["cell"], []).append(row["continuations"])
    encoder = load_encoder(str(tmp_path / "encoder"), "cpu")
    written = {cell: [text for samples in some for text in samples if text.strip()] for cell, some in texts.items()}
    expected = mauve(*(encoder.encode(written[f"none k=8 seed={seed}"]) for seed in (1, 3)))
    assert rows["none k=8 seed=1"]["mauve"]["value"] == pytest.approx(expected)
    assert "mauve" not in rows["none k=8 seed=3"]
    assert "repetition" in rows["none k=8 seed=3"]
    assert all(rows[f"rad-q β=0 k=8 seed={seed}"]["mauve"]["value"] == 1 for seed in (1, 3))  # the same texts


def test_generations_of_others_are_measured(
    run: Path, world: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = f"classifier:{world / 'judge'}"
    argv = ["eval", "measure", "--json", "--metrics", "avg_max,positive_rate,perplexity,dist_2", "--judge", judge]
    argv += ["--perplexity", str(toy), "--resamples", "50", "--cache", str(tmp_path)]
    assert main([*argv, str(run / "generations.jsonl")]) == 0
    found = {(row["cell"], row["group"]): row["metrics"] for row in json.loads(capsys.readouterr().out)["metrics"]}
    for row in read_lines(run / "metrics.jsonl"):
        ours = {name.replace(judge, "mood"): value for name, value in found[row["cell"], row["group"]].items()}
        assert {*ours, "ended", "length"} == {*row["metrics"]}  # files of others do not say how their texts ended
        for name, value in ours.items():
            assert value == pytest.approx(row["metrics"][name], rel=1e-4, nan_ok=True)
    rows = [{"prompt": {"text": "the film"}, "generations": [{"text": " was good"}, {"text": " was good"}]}] * 2
    (tmp_path / "theirs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["eval", "measure", "--json", "--metrics", "dist_1", str(tmp_path / "theirs.jsonl")]) == 0
    (row,) = json.loads(capsys.readouterr().out)["metrics"]
    assert (row["cell"], row["group"], row["prompts"]) == ("theirs", "all", 2)
    assert row["metrics"]["dist_1"]["value"] == pytest.approx(3 / 6)  # "", was, good of six words
    for options, problem in (
        (["--metrics", "avg_max"], "has no judge"),
        (["--metrics", "fluency"], "no metric 'fluency'"),
        (["--metrics", "perplexity"], "has no model"),
        (["--metrics", "mauve"], "nothing to compare"),
    ):
        assert problem in fails(capsys, "eval", "measure", *options, str(tmp_path / "theirs.jsonl"))
    (tmp_path / "other.jsonl").write_text('{"question": "why"}\n')
    assert "line 1 has no generations, but question" in fails(capsys, "eval", "measure", str(tmp_path / "other.jsonl"))


# --- models that change in their folders ---


def remake_classifier(folder: Path) -> None:
    make_classifier(folder, seed=1)


def remake_encoder(folder: Path) -> None:
    make_classifier(folder, kind="encoder", seed=1)


def nudge(folder: Path) -> None:
    """Change one number of the weights by as little as one step of an optimiser."""
    weights = load_file(folder / "model.safetensors")
    weights[max(weights, key=lambda name: weights[name].numel())][-1, -1] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def small(world: Path, toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of few texts, with copies of all its models beside it."""
    folder = tmp_path_factory.mktemp("small")
    for name, source in {
        "base": toy,
        "likely": toy,
        "q": world / "q",
        "v": world / "v",
        "judge": world / "judge",
    }.items():
        shutil.copytree(source, folder / name)
    make_classifier(folder / "encoder", kind="encoder")
    guides: Any = describe(folder, toy)["guides"]
    more = {
        "prompts": [{"file": str(world / "long.jsonl")}],
        "guides": {"rad-q": guides["rad-q"], "best": guides["best"]},
    }
    named = {"base": str(folder / "base"), "perplexity": str(folder / "likely"), "mauve": str(folder / "encoder")}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(describe(folder, toy, **more, **named)))
    assert main(small_command(folder)) == 0
    return folder


def small_command(folder: Path) -> list[str]:
    argv = ["eval", "--config", str(folder / "sweep.yaml"), "--out", str(folder / "run")]
    return [*argv, "--cache", str(folder / "cache"), "--json"]


@pytest.mark.parametrize(
    ("model", "change", "named"),
    [
        ("base", nudge, "the base model"),
        ("q", nudge, "the guide 'best', the guide 'rad-q'"),
        ("judge", remake_classifier, "the judge 'mood'"),
        ("likely", nudge, "the model that measures perplexity"),
        ("encoder", remake_encoder, "the encoder of MAUVE"),
    ],
)
def test_a_model_that_has_changed_in_its_folder_is_named_and_refused(
    small: Path, model: str, change: Callable[[Path], None], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = outcome(small / "run")
    shutil.copytree(small / model, small / "kept")
    try:
        change(small / model)
        assert f"changed since: {named}." in fails(capsys, *small_command(small))
    finally:
        shutil.rmtree(small / model)
        (small / "kept").rename(small / model)
    assert main(small_command(small)) == 0
    assert outcome(small / "run") == before


def test_overwriting_begins_anew_with_the_changed_models(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(small, tmp_path / "small")
    config = (small / "sweep.yaml").read_text().replace(str(small), str(tmp_path / "small"))
    (tmp_path / "small" / "sweep.yaml").write_text(config)
    remake_classifier(tmp_path / "small" / "judge")
    argv = small_command(tmp_path / "small")
    assert "holds another sweep" in fails(capsys, *argv)
    assert main([*argv, "--overwrite"]) == 0
    anew, before = outcome(tmp_path / "small" / "run"), outcome(small / "run")
    assert anew["generations.jsonl"] == before["generations.jsonl"]
    assert anew["metrics.jsonl"] != before["metrics.jsonl"]


def test_a_run_that_knows_no_fingerprints_says_so_once(small: Path, tmp_path: Path) -> None:
    shutil.copytree(small / "run", tmp_path / "run")
    (tmp_path / "run" / FINGERPRINTS).unlink()
    argv = small_command(small)
    argv[argv.index(str(small / "run"))] = str(tmp_path / "run")
    with pytest.warns(UserWarning, match="begun by an older radq"):
        assert main(argv) == 0
    assert main(argv) == 0


# --- kills ---


def outcome(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("generations.jsonl", "metrics.jsonl", "differences.jsonl")}


@pytest.mark.slow
def test_a_torn_file_is_mended(run: Path, write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = outcome(run)
    for cut in (1, 200, len(whole["generations.jsonl"]) // 2, len(whole["generations.jsonl"]) - 3):
        shutil.rmtree(tmp_path / "torn", ignore_errors=True)
        shutil.copytree(run, tmp_path / "torn")
        shutil.rmtree(tmp_path / "torn/measures")
        for name in ("metrics.jsonl", "differences.jsonl"):
            (tmp_path / "torn" / name).unlink()
        (tmp_path / "torn/generations.jsonl").write_bytes(whole["generations.jsonl"][:cut])
        argv = ["eval", "--json", "--config", write(), "--out", str(tmp_path / "torn"), "--cache", str(tmp_path / "c")]
        assert main(argv) == 0
        capsys.readouterr()
        assert outcome(tmp_path / "torn") == whole


def test_what_is_whole_can_be_measured_before_the_rest_is_there(
    run: Path, write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, folder = outcome(run), tmp_path / "stopped"
    argv = ["eval", "--json", "--config", write(), "--out", str(folder), "--cache", str(tmp_path / "c")]
    assert "no complete cell" in fails(capsys, *argv, "--only-measure")
    for other in ("--only-generate", "--overwrite"):
        assert "nothing to measure" in fails(capsys, *argv, "--only-measure", other)
    lines = whole["generations.jsonl"].splitlines(keepends=True)
    cells = list(dict.fromkeys(json.loads(line)["cell"] for line in lines))
    third = next(n for n, line in enumerate(lines) if json.loads(line)["cell"] == cells[3])
    (folder / "generations.jsonl").write_bytes(b"".join(lines[: third + 1]) + lines[third + 1][:9])
    shutil.copy(run / FINGERPRINTS, folder)
    assert main([*argv, "--only-measure"]) == 0
    measured = json.loads(capsys.readouterr().out)["metrics"]
    assert list(dict.fromkeys(row["cell"] for row in measured)) == cells[:3]
    assert whole["metrics.jsonl"].startswith((folder / "metrics.jsonl").read_bytes())
    assert main(argv) == 0
    capsys.readouterr()
    assert outcome(folder) == whole


KILLS = [  # a run is killed after so many calls of this function; each goes on where the one before was killed
    ("radq.evaluation.sweep.generate:append_lines", 3),  # generations that have no costs yet
    ("radq.evaluation.sweep.generate:append_lines", 4),
    ("radq.evaluation.sweep.generate:load_engine", 1),
    ("radq.judges.base:CachedJudge._store", 1),  # within a group of texts
    ("radq.evaluation.sweep.measure:measure_likelihoods", 3),  # between cells
    ("radq.judges.base:CachedJudge._store", 4),
    ("radq.evaluation.sweep.measure:_metrics_row", 5),
    ("radq.evaluation.sweep.measure:compare_guides", 1),
]


def find_differences(before: bytes, after: bytes) -> list[tuple[str, Any, Any]]:
    """Where two files of JSON lines differ; nowhere only if every byte is the same."""
    one, two = before.splitlines(), after.splitlines()
    changes: list[tuple[str, Any, Any]] = [("lines", len(one), len(two))] if len(one) != len(two) else []
    for number, (old, new) in enumerate(zip(one, two, strict=False)):
        if old != new:
            leaves = [dict(walk(json.loads(line))) for line in (old, new)]
            places = sorted(leaves[0].keys() | leaves[1].keys())
            found = [(f"{number}{p}", leaves[0].get(p), leaves[1].get(p)) for p in places]
            changes += [change for change in found if change[1] != change[2]] or [(str(number), old, new)]
    return changes


def walk(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from walk(part, f"{place}/{key}")
    else:
        yield place, value


@pytest.mark.slow
def test_kills_change_nothing(run: Path, world: Path, write: Any, tmp_path: Path) -> None:
    """Neither does a cache of scores that knows some of the texts from another run."""
    rows = list(read_lines(run / "generations.jsonl"))
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[5:20:3]))
    cache = ["--cache", str(tmp_path / "cache")]
    judge = ["--metrics", "avg_max", "--judge", f"classifier:{world / 'judge'}"]
    assert main(["eval", "measure", "--json", *judge, *cache, str(tmp_path / "some.jsonl")]) == 0
    argv = ["eval", "--json", "--config", write(), "--out", str(tmp_path / "killed"), *cache]
    for function, calls in KILLS:
        run_and_kill(function, calls, argv)
    assert main(argv) == 0
    for name, content in outcome(run).items():
        assert find_differences(content, outcome(tmp_path / "killed")[name]) == [], name


@pytest.mark.slow
def test_full_memory_means_smaller_batches(
    run: Path, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They give the same texts at the same costs per token."""
    draw = Decoder.draw

    def crowded(self: Decoder, *arguments: Any) -> Any:
        if self.count > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return draw(self, *arguments)

    monkeypatch.setattr(Decoder, "draw", crowded)
    argv = ["--config", write(batch_size=16), "--out", str(tmp_path / "run"), "--cache", str(tmp_path), "--json"]
    with pytest.warns(UserWarning, match="texts at once for some time"):
        assert main(["eval", *argv]) == 0
    assert (tmp_path / "run" / "generations.jsonl").read_bytes() == (run / "generations.jsonl").read_bytes()
    wanted, found = read_costs(run), read_costs(tmp_path / "run")
    for cell in ("rad-q β=5 k=8 seed=0", "rad-v β=20 k=8 seed=0"):
        assert found[cell]["expert_tokens_per_token"] == wanted[cell]["expert_tokens_per_token"]


@pytest.mark.parametrize("draws", ["generate", "best_of_n"])
@pytest.mark.filterwarnings("ignore:the (GPU's )?memory is full")
def test_no_memory_for_one_text(
    draws: str,
    write: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    if draws == "generate":
        monkeypatch.setattr(Decoder, "draw", full)
    else:
        monkeypatch.setattr(RewardModel, "token_rewards", full)
    out = tmp_path / "run"
    error = fails(capsys, "eval", "--config", write(), "--out", str(out))
    assert "no memory for a single text" in error


def test_one_process_at_a_time(run: Path, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another sweep is running" in fails(capsys, "eval", "--json", "--config", write(), "--out", str(run))


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(DataError, match="line 2 is not JSON"):
        list(read_lines(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"a": ')
    assert list(read_lines(tmp_path / "rows.jsonl")) == [{"a": 1}]
    drop_partial_last_line(tmp_path / "rows.jsonl")
    assert (tmp_path / "rows.jsonl").read_bytes() == b'{"a": 1}\n'


def test_names_of_cells() -> None:
    assert SweepCell("rad-q", 0.5, None, 0.9, None, 3).name == "rad-q β=0.5 p=0.9 seed=3"
    assert SweepCell("rad-q", -10.0, 20, None, 1e-5, 0).name == "rad-q β=-10 k=20 kl=1e-05 seed=0"


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(0, 2**63), min_size=2, unique=True))
def test_different_numbers_have_different_names(numbers: list[float]) -> None:
    assert len({exact(number) for number in numbers}) == len(numbers)


def test_seeds_that_differ_in_the_last_of_many_digits(write: Any, tmp_path: Path) -> None:
    guides = {"q": describe(tmp_path, tmp_path)["guides"]["rad-q"] | {"beta": [1000000.25, 1000000.5]}}
    cells = load_sweep(write(seeds=[20240101, 20240102], guides=guides)).cells()
    assert len({cell.name for cell in cells}) == len(cells) == 2 + 2 * 2
