"""The README's example and commands run as they are written."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from radq.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
DOCS = Path(__file__).parent.parent / "docs"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the README's first example ran, and what it printed."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "example.py").write_text(blocks("python")[0], encoding="utf-8")
    result = subprocess.run([sys.executable, "example.py"], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def test_the_example_steers(example: tuple[Path, str]) -> None:
    good = {"good", "great", "fine", "lovely", "bright", "moving"}
    praise = {}
    for beta, text in re.findall(r"^ *(-?\d+): (.*)$", example[1], flags=re.MULTILINE):
        praise[beta] = praise.get(beta, 0) + sum(word in good for word in text.split())
    assert praise.keys() == {"-10", "0", "10"}
    assert praise["-10"] < praise["0"] < praise["10"]


def test_the_example_is_short() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 23


def test_the_first_command_is_the_demo() -> None:
    assert blocks("sh")[0].startswith("make demo")


def test_the_commands_after_it_run(
    example: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(example[0])
    monkeypatch.setenv("COLUMNS", "100")
    block = next(block for block in blocks("sh") if "--base toy" in block)
    commands = [line for line in block.splitlines() if line.startswith("radq ")]
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
        assert "film" in capsys.readouterr().out


def test_every_test_that_the_docs_name_exists() -> None:
    named = [
        pair
        for file in DOCS.glob("*.md")
        for pair in re.findall(r"`([\w/]*test_\w+)::(test_\w+)`", file.read_text("utf-8"))
    ]
    assert len(named) >= 20
    for file, test in named:
        assert f"def {test}(" in (Path(__file__).parent / f"{file}.py").read_text(encoding="utf-8"), test


def test_links_in_the_readme_exist() -> None:
    for link in re.findall(r"\]\(((?!http)[^)]+)\)", README):
        assert (Path(__file__).parent.parent / link.partition("#")[0]).exists(), link
