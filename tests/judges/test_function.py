"""Judges that are functions of the user: what they return, and all ways in which they may fail."""

import sys
from pathlib import Path

import numpy as np
import pytest

from radq.cli import main
from radq.errors import ModelError, OptionError
from radq.judges.base import CachedJudge
from radq.judges.models import load_judge

MODULE = """
import os, sys, time

def words(texts):
    print("this line is not an answer")
    return [None if text == "?" else len(text.split()) / 10 for text in texts]
words.limits = (0, 1)

def slow(texts):
    time.sleep(60)
slow.seconds = 0.5

def waits(texts):
    time.sleep(0 if "first" in texts else 3600)
    return [1.0 for text in texts]
waits.seconds = 3600

def fails(texts):
    return [1 / text.count("a") for text in texts]

def short(texts):
    return [1.0]

def strings(texts):
    return ["good" for text in texts]

def infinite(texts):
    return [float("inf") for text in texts]

def ends(texts):
    os._exit(3)

class Scores:
    @staticmethod
    def length(texts):
        import numpy
        return numpy.array([len(text) for text in texts])
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "own_scores.py"
    file.write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return file


def test_scores_are_those_of_the_function(module: Path) -> None:
    judge = load_judge("function:own_scores:words")
    texts = [f"one{' more' * (n % 9)}" for n in range(100)]
    np.testing.assert_array_equal(judge.score(texts), [len(text.split()) / 10 for text in texts])
    assert (judge.limits, judge.attribute) == ((0, 1), "words")
    lengths = load_judge("function:own_scores:Scores.length")
    assert lengths.score(["abc", ""])[0] == 3
    assert lengths.limits == (-np.inf, np.inf)


def test_missing_scores_are_counted(module: Path) -> None:
    judge = load_judge("function:own_scores:words")
    np.testing.assert_array_equal(judge.score(["a b", "?", ""]), [0.2, np.nan, np.nan])
    assert judge.missing == 1


def test_scores_are_kept_until_the_module_changes(module: Path, tmp_path: Path) -> None:
    kept = []
    for change in ("", "", "# another formula\n"):
        module.write_text(module.read_text() + change)
        judge = CachedJudge(load_judge("function:own_scores:words"), tmp_path / "cache")
        judge.score(["a b", "c"])
        kept.append(judge.kept)
    assert kept == [0, 2, 0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("slow", "took more than 0.5 seconds in a batch of 2 texts, the first of them 'a banana'"),
        ("fails", "failed with ZeroDivisionError: division by zero for 'oh'"),
        ("short", "it returned 1 numbers for 2 texts"),
        ("strings", "it returned texts instead of numbers"),
        ("infinite", "gave inf for 'a banana'"),
        ("ends", "ended with code 3"),
    ],
)
def test_a_function_that_fails_is_one_line(name: str, message: str, module: Path) -> None:
    judge = load_judge(f"function:own_scores:{name}")
    for _ in range(2):  # its process is begun again
        with pytest.raises(ModelError, match=message):
            judge.score(["a banana", "oh"])


def test_work_that_is_stopped_waits_for_no_batch(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    judge = load_judge("function:own_scores:waits")
    work = judge.judge(["first", *("other" for _ in range(40))])
    assert len(next(work)[0]) == 32
    work.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert judge.score(["first"]) == [1.0]


@pytest.mark.parametrize("place", ["own_scores:nothing", "no_module:words", "own_scores"])
def test_a_function_that_is_not_there(place: str, module: Path) -> None:
    with pytest.raises((ModelError, OptionError), match=r"cannot be used|names no function"):
        load_judge(f"function:{place}")


def test_the_command_line_scores_by_a_function(module: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "score", "a b c", "--judge", "function:own_scores:words", "--cache", "cache"]) == 0
    assert "0.3" in capsys.readouterr().out
    assert main(["judge", "score", "a b c", "--judge", "function:own_scores:fails", "--cache", "cache"]) == 0
    assert main(["judge", "score", "oh", "--judge", "function:own_scores:fails", "--cache", "cache"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert "own_scores" not in sys.modules
