"""radq calibrate on a toy: a table in the model folder, which other commands use."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from classifiers import make_classifier
from command_calls import make_steering_model, write_openings
from command_runs import fails
from kills import run_and_kill
from safetensors.torch import load_file, save_file

from radq.cli import main
from radq.models.calibration import CALIBRATION, read_calibrations


@pytest.fixture(scope="module")
def world(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with strong opinions, a judge of none, and prompts."""
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    for name, attributes in (("q", ["praise"]), ("two", ["praise", "calm"])):
        make_steering_model(toy, attributes).save_pretrained(folder / name)
    make_classifier(folder / "classifier")
    write_openings(folder / "prompts.txt")
    return folder


@pytest.fixture
def call(world: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Make the words of a command over a model folder, with the model itself as the judge."""

    def make(*more: str, model: str = "q", judge: str = "reward:{world}/q") -> list[str]:
        words = ["calibrate", f"{world}/{model}", "--base", str(toy), "--prompts", f"{world}/prompts.txt"]
        words += ["--judge", judge.format(world=world), "--max-new-tokens", "6", "--samples", "4", "--top-k", "8"]
        words += ["--levels", "5", "15", "--max-perplexity-ratio", "20", "--resamples", "100", "--json"]
        return [*words, "--cache", str(tmp_path / "cache"), *more]

    return make


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(words) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.filterwarnings("ignore:the judge")
def test_strengths_are_stored_and_used(
    call: Any, world: Path, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(call("--plot", str(tmp_path / "plot.svg")), capsys)
    assert found["out"] == str(world / "q" / CALIBRATION)
    (stored,) = read_calibrations(world / "q")
    assert [point["strength"] for point in found["table"]] == [point.strength for point in stored.table]
    betas, scores = [point.beta for point in stored.table], [point.score for point in stored.table]
    assert betas == sorted(betas)
    assert scores == sorted(scores)
    assert betas[0] == 0 < betas[-1] <= 15
    assert (tmp_path / "plot.svg").read_text().count("strong") == 1
    assert "--levels 5 15" in stored.command
    assert "--cache" not in stored.command

    def write(guide: str, *more: str) -> list[str]:
        words = ["generate", "--base", str(toy), "--guide", f"{world}/q:praise={guide}", "--prompt", "the film"]
        return [one["text"] for one in run([*words, "--samples", "4", *more, "--json"], capsys)["generations"]]

    beta = stored.at(0.6).beta
    assert write("60%") == write(str(beta)) == write(str(beta), "--kl-budget", str(stored.at(0.6).kl_budget))
    assert write("strong") == write(str(betas[-1])) != write("0")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the judge")
def test_a_killed_calibration_goes_on(call: Any, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = call("--seed", "5")
    run_and_kill("radq.evaluation.sweep.generate:append_lines", 4, words)  # a text file and its costs for two cells
    run_and_kill("radq.evaluation.sweep.measure:write_arrays", 2, words)
    after = run(words, capsys)
    words[words.index("--cache") + 1] += "-of-another-run"
    assert run(words, capsys) == after


@pytest.mark.filterwarnings("ignore:intervals from")
def test_a_judge_that_has_changed_in_its_folder_judges_again(
    call: Any, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = tmp_path / "judge"
    shutil.copytree(world / "q", judge)
    words = call("--limit", "8", judge=f"reward:{judge}")
    before = run(words, capsys)
    assert run(words, capsys) == before
    weights = load_file(judge / "model.safetensors")
    weights = {name: 0.9 * value if name.startswith("head.") else value for name, value in weights.items()}
    save_file(weights, judge / "model.safetensors", metadata={"format": "pt"})
    again = run(words, capsys)
    assert again["measured"][0]["score"] != before["measured"][0]["score"]
    words[words.index("--cache") + 1] += "-without-the-old-judge"
    assert run(words, capsys) == again


@pytest.mark.filterwarnings("ignore:the judge")
def test_an_attribute_is_reduced_by_kl(call: Any, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    levels = ["--levels", "0.1", "0.8"]
    words = ("--reduce", "--by", "kl", "--attribute", "praise", "--ends", "taught")
    judged = call(*words, model="two", judge="reward:{world}/two#praise")
    place = judged.index("--levels")
    found = run([*judged[:place], *levels, *judged[place + 3 :]], capsys)
    table = found["table"]
    assert {point["beta"] for point in table} == {-120}
    budgets = [point["kl_budget"] for point in table]
    assert budgets == sorted(budgets)
    assert 0 < budgets[-1] <= 0.8
    assert table[-1]["score"] < table[0]["score"]


@pytest.mark.filterwarnings("ignore:the judge still improves")
def test_a_judge_that_is_the_guide_is_named(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    itself, few = "is the reward model itself", "intervals from 3 prompts are too narrow"
    with pytest.warns(UserWarning, match=itself), pytest.warns(UserWarning, match=few):
        main(call("--limit", "3"))
    capsys.readouterr()


def test_a_flat_judge(call: Any, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, *call(judge="classifier:{world}/classifier"))
    assert "no strength improves" in line
    line = fails(capsys, *call(model="two"))
    assert "--attribute praise or calm" in line
