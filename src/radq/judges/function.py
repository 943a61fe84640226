"""Judges that are Python functions of the user: a linter, a parser, a regular expression, a formula of readability.

    def short_words(texts):
        return [sum(len(word) < 6 for word in text.split()) / len(text.split()) for text in texts]

    short_words.limits = (0, 1)  # where it has a lowest and a highest score
    short_words.seconds = 5  # that it may take for a batch of texts; 60 by default

    judge = load_judge("function:mypackage.scores:short_words")

The module is found as `python -m` finds it, also in the current folder. The function runs in processes of its own,
which are ended when it takes too long. None and NaN stand for texts that it cannot score.
"""

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Timer
from typing import Any, final

import numpy as np

from radq.errors import ModelError, OptionError, first_line
from radq.files import fingerprint_values
from radq.judges.base import Judge, Scored

BATCH = 32  # texts of one call
SECONDS = 60.0  # of one call, unless the function says otherwise
START_SECONDS = 120.0  # for the import of the module, which may load a model
MOST_PROCESSES = 8


@final
class FunctionJudge(Judge):
    """The numbers that a function returns for texts. Kept scores are those of the same source file of its module."""

    def __init__(self, place: str):
        module, _, self.attribute = place.rpartition(":")
        if not module or not self.attribute:
            raise OptionError(f"'function:{place}' names no function.", "write it as function:MODULE:FUNCTION.")
        self.place, self._idle = place, SimpleQueue()
        first = Process(place)
        self._idle.put(first)
        low, high = first.about["limits"] or (-math.inf, math.inf)
        self.limits, self.seconds = (low, high), first.about["seconds"] or SECONDS
        self.name = f"function:{place}@{first.about['source']}"
        self._number, self._running = min(MOST_PROCESSES, os.cpu_count() or 1), set()
        for _ in range(self._number - 1):
            self._idle.put(None)  # begun when it is needed

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        batches = [range(first, min(first + BATCH, len(texts))) for first in range(0, len(texts), BATCH)]
        with ThreadPoolExecutor(self._number) as threads:
            results = threads.map(partial(self._call, texts, stop := Event()), batches)
            try:
                for batch, scores in zip(batches, results, strict=True):
                    known = [n for n, score in enumerate(scores) if score is not None]
                    yield [batch[n] for n in known], np.array([scores[n] for n in known])
                    for _ in range(len(scores) - len(known)):
                        self.counts["missing"] += 1
                        yield [], np.array([])
            finally:  # also after Ctrl-C, and after an error, which must not wait for other batches
                stop.set()
                for process in list(self._running):
                    process.child.kill()
                threads.shutdown(cancel_futures=True)

    def _call(self, texts: Sequence[str], stop: Event, batch: range) -> list[float | None]:
        process = self._idle.get()
        try:
            process = process or Process(self.place)
            self._running.add(process)
            return [] if stop.is_set() else process.score([texts[n] for n in batch], self.seconds)
        finally:
            self._running.discard(process)
            ended = process is None or process.child.poll() is not None
            self._idle.put(None if ended else process)


class Process:
    """A Python process that imports the function, and scores the texts that it is given as lines of JSON."""

    def __init__(self, place: str):
        self.place = place
        command = [sys.executable, "-m", "radq.judges.function", place]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.child = subprocess.Popen(command, **pipes, start_new_session=True)  # Ctrl-C is for radq alone
        self.about = self._receive(START_SECONDS, "while it is imported")

    def score(self, texts: list[str], seconds: float) -> list[float | None]:
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer that does not come says so
            self.child.stdin.write(json.dumps(texts).encode() + b"\n")
            self.child.stdin.flush()
        return self._receive(seconds, f"in a batch of {len(texts)} texts, the first of them {texts[0][:60]!r}")[
            "scores"
        ]

    def _receive(self, seconds: float, where: str) -> dict[str, Any]:
        """Wait for an answer; without one in time, the process is ended."""
        assert self.child.stdout is not None
        late = Event()
        timer = Timer(seconds, lambda: (late.set(), self.child.kill()))
        timer.start()
        line = self.child.stdout.readline()
        timer.cancel()
        answer = json.loads(line) if line else {}
        if answer and "error" not in answer:
            return answer
        self.close()
        ended = f"took more than {seconds:g} seconds" if late.is_set() else f"ended with code {self.child.returncode}"
        raise ModelError(
            f"the function {self.place} {answer.get('error', ended)} {where}.",
            "see what it has printed, and call it with this text.",
        )

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout):
            with contextlib.suppress(BrokenPipeError):  # what was not sent is not needed
                stream.close()  # pyright: ignore[reportOptionalMemberAccess]

    def __del__(self) -> None:
        if hasattr(self, "child"):
            self.close()


# --- inside the process ---


def work(place: str) -> None:
    """Answer lines of texts by lines of scores. What the function prints goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = place.rpartition(":")
    try:
        function = importlib.import_module(module)
        source = fingerprint_values(Path(function.__file__ or "").read_text(encoding="utf-8"))
        for part in name.split("."):
            function = getattr(function, part)
        about = {"limits": getattr(function, "limits", None), "seconds": getattr(function, "seconds", None)}
        _send(answers, about | {"source": source})
    except Exception as error:  # whatever the user's module raises
        _send(answers, {"error": f"cannot be used: {_describe(error)},"})
        return
    for line in sys.stdin:
        texts = json.loads(line)
        try:
            answer: dict[str, Any] = {"scores": _score(function, texts)}
        except Exception as error:
            answer = {"error": f"failed with {_describe(error)}{_find_text(function, texts)}"}
        _send(answers, answer)


def _score(function: Any, texts: list[str]) -> list[float | None]:
    values = list(function(texts))
    if len(values) != len(texts):
        raise ValueError(f"it returned {len(values)} numbers for {len(texts)} texts")
    if any(isinstance(value, (str, bytes)) for value in values):
        raise TypeError("it returned texts instead of numbers")
    scores = [math.nan if value is None else float(value) for value in values]
    return [None if math.isnan(score) else score for score in scores]


def _find_text(function: Any, texts: list[str]) -> str:
    """Name the first text that fails alone, too."""
    for text in texts:
        try:
            _score(function, [text])
        except Exception:
            return f" for {text[:60]!r}"
    return ""


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _send(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    work(sys.argv[1])
