"""What every judge does: blank texts, the range of scores, and a cache that survives kills and other texts."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radq.errors import DataError, ModelError
from radq.judges.base import CachedJudge, Judge, Scored
from radq.judges.models import invert


class Lengths(Judge):
    """Scores a text by its length, backwards and in pairs; remembers what it was asked."""

    def __init__(self, name: str = "lengths") -> None:
        self.name = name
        self.asked: list[str] = []

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        for last in range(len(texts), 0, -2):
            positions = range(max(0, last - 2), last)
            self.asked += [texts[n] for n in positions]
            yield positions, np.array([min(1.0, len(texts[n]) / 10) for n in positions])


@pytest.mark.parametrize("wrap", [lambda judge: judge, invert])
def test_blank_texts_have_no_score(wrap: Callable[[Judge], Judge], tmp_path: Path) -> None:
    inner = Lengths()
    for judge in (wrap(inner), CachedJudge(wrap(inner), tmp_path)):
        scores = judge.score(["", "abc", " \n\t", "a"])
        assert np.isnan(scores).tolist() == [True, False, True, False]
    assert set(inner.asked) == {"abc", "a"}
    assert len(Lengths().score([])) == 0


def test_scores_outside_the_range_are_refused_and_not_kept(tmp_path: Path) -> None:
    class Wrong(Lengths):
        def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
            yield range(len(texts)), np.full(len(texts), 1.5)

    with pytest.raises(ModelError, match="gave 1.5 for 'film'"):
        Wrong().score(["film"])
    for _ in range(2):
        with pytest.raises(ModelError, match="gave 1.5 for 'film'"):
            CachedJudge(Wrong(), tmp_path).score(["", "film"])


# --- the cache ---


def test_a_text_is_judged_once(tmp_path: Path) -> None:
    inner = Lengths()
    judge = CachedJudge(inner, tmp_path)
    texts = ["abc", "a", "abc", "", "abcdef", "a"]
    wanted = [0.3, 0.1, 0.3, np.nan, 0.6, 0.1]
    np.testing.assert_allclose(judge.score(texts), wanted)
    assert sorted(inner.asked) == ["a", "abc", "abcdef"]
    np.testing.assert_allclose(CachedJudge(inner, tmp_path).score([*texts, "new"]), [*wanted, 0.3])
    assert inner.asked[3:] == ["new"]
    other = Lengths("others")
    CachedJudge(other, tmp_path).score(["abc"])
    assert other.asked == ["abc"]
    assert judge.name == "lengths"


@settings(max_examples=30, deadline=None)
@given(calls=st.lists(st.lists(st.text("ab \n", max_size=4), max_size=12), max_size=3))
def test_a_cached_judge_says_what_the_judge_says(calls: list[list[str]]) -> None:
    inner = Lengths()
    with tempfile.TemporaryDirectory() as folder:
        for texts in calls:
            np.testing.assert_array_equal(CachedJudge(inner, folder).score(texts), Lengths().score(texts))
    assert len(inner.asked) == len(set(inner.asked))


def test_more_texts_than_a_query_takes(tmp_path: Path) -> None:
    texts = [f"{n}" for n in range(1203)]
    inner = Lengths()
    first = CachedJudge(inner, tmp_path).score(texts)
    np.testing.assert_array_equal(CachedJudge(inner, tmp_path).score(texts[::-1]), first[::-1])
    assert len(inner.asked) == 1203


def test_what_was_scored_before_a_failure_stays(tmp_path: Path) -> None:
    class Fails(Lengths):
        def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
            for n, scored in enumerate(super().judge(texts)):
                if n == 2:
                    raise ModelError("the connection is lost.")
                yield scored

    with pytest.raises(ModelError, match="lost"):
        CachedJudge(Fails(), tmp_path).score(["a", "b", "c", "d", "e", "f"])
    inner = Lengths()
    CachedJudge(inner, tmp_path).score(["a", "b", "c", "d", "e", "f"])
    assert sorted(inner.asked) == ["a", "b"]


class Neighbours(Judge):
    """Scores that depend on all texts of a call, as those of a batched model do in their last digits."""

    name = "neighbours"
    group_size = 4

    def __init__(self, fails_after: int | None = None):
        self.fails_after, self.calls = fails_after, 0

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        size = sum(map(len, texts)) + len(texts) / 10
        for n, text in enumerate(texts):
            if self.calls == self.fails_after:
                raise ModelError("the machine went down.")
            self.calls += 1
            yield [n], np.array([(len(text) + size / 1000) / (1 + size)])


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("ab ", max_size=4), max_size=14),
    earlier=st.lists(st.lists(st.text("ab ", max_size=4), max_size=9), max_size=3),
    stops=st.lists(st.integers(0, 12), max_size=4),
)
def test_scores_do_not_depend_on_what_the_cache_held(
    texts: list[str], earlier: list[list[str]], stops: list[int]
) -> None:
    """Nothing, other texts, or part of these, from runs that stopped after any number of scores."""
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryDirectory() as warm:
        expected = CachedJudge(Neighbours(), empty).score(texts)
        for others in earlier:
            CachedJudge(Neighbours(), warm).score(others)
        for stop in stops:
            with contextlib.suppress(ModelError):
                CachedJudge(Neighbours(stop), warm).score(texts)
        np.testing.assert_array_equal(CachedJudge(Neighbours(), warm).score(texts), expected)
        again = Neighbours()
        np.testing.assert_array_equal(CachedJudge(again, warm).score(texts), expected)
        assert again.calls == 0


WORKERS = """
import json, os, signal, sys
import numpy as np
from radq.judges.base import CachedJudge, Judge
class Logs(Judge):
    name = "logs"
    def __init__(self, log, kill_after):
        self.log, self.kill_after = log, kill_after
    def judge(self, texts):
        for n, text in enumerate(texts):
            if n == self.kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            with open(self.log, "a") as stream:
                stream.write(text + "\\n")
            yield [n], np.array([int(text) / 1000])
def work(log, first, last, kill_after):
    scores = CachedJudge(Logs(log, kill_after), sys.argv[1]).score([str(n) for n in range(first, last)])
    os._exit(0 if np.allclose(scores, np.arange(first, last) / 1000) else 1)
for jobs in json.loads(sys.argv[2]):
    children = [os.fork() or work(*job) for job in jobs]
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def run_workers(cache: Path, *rounds: list[tuple[str, int, int, int | None]]) -> list[list[int]]:
    """Exit codes of processes that judge the numbers from `first` to `last`; those of a round work side by side."""
    command = [sys.executable, "-c", WORKERS, str(cache), json.dumps(rounds)]
    done = subprocess.run(command, env=os.environ, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def count_rows(cache: Path) -> tuple[int, int]:
    with contextlib.closing(sqlite3.connect(cache / "judges.sqlite")) as database:
        return database.execute("SELECT count(*), count(DISTINCT text) FROM scores").fetchone()


def test_a_kill_loses_nothing_that_was_scored(tmp_path: Path) -> None:
    log = tmp_path / "log"
    killed = run_workers(tmp_path / "cache", [(str(log), 0, 400, 3)], [(str(log), 0, 400, 2)])
    assert killed == [[-signal.SIGKILL], [-signal.SIGKILL]]
    assert log.read_text().split() == ["0", "1", "2", "3", "4"]
    assert count_rows(tmp_path / "cache") == (5, 5)


def test_processes_share_a_cache(tmp_path: Path) -> None:
    jobs = [(str(tmp_path / f"log{n}"), 20 * n, 20 * n + 60, None) for n in range(3)]
    assert run_workers(tmp_path / "cache", jobs) == [[0, 0, 0]]
    assert count_rows(tmp_path / "cache") == (100, 100)


def test_a_file_that_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "judges.sqlite").write_text("this is no database, only some text of some length " * 30)
    with pytest.raises(DataError, match=r"judges\.sqlite.*remove the file"):
        CachedJudge(Lengths(), tmp_path).score(["a"])


def test_the_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    CachedJudge(Lengths()).score(["a"])
    assert (tmp_path / "radq" / "judges.sqlite").is_file()
