"""A judge that asks a language model, on an OpenAI-compatible server, for scores by a rubric.

    judge = RubricJudge(find_server("my-model"), read_rubric("rubric.md"))
    CachedJudge(judge).score(["a lovely film"])  # array([5.])

Importing this module imports no torch.
"""

from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

import numpy as np

from radq.errors import OptionError
from radq.files import fingerprint_values
from radq.judges.base import Judge, Scored
from radq.judges.chat import ChatServer, RefusedError, find_server
from radq.judges.rubric import read_rubric, split_rubric

ASKS = 3  # questions about one text, while its answers are no scores
JOBS = 8
LONGEST_ANSWER = 500  # characters of an answer that are sent back with the next question


@runtime_checkable
class Questions(Protocol):
    """Questions are asked by a judge about texts, and turn answers into scores; `Rubric` is an example."""

    @property
    def scale(self) -> tuple[float, float]: ...
    @property
    def demand(self) -> str: ...
    @property
    def reminder(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    def question(self, text: str) -> str: ...
    def find_score(self, answer: str) -> float | None: ...


class Outcome(NamedTuple):
    """The score of the text at a position; None if it is missing, with the reason."""

    position: int
    score: float | None
    problem: str = ""


@final
class RubricJudge(Judge):
    """Scores texts by a rubric, on the scale of the rubric, several texts at the same time.

    An answer that is no number of the scale is asked for again. A text without such an answer, or one that the server
    refuses, gets no score: it is missing. `problem` is the first reason for that.
    """

    attribute = "score"

    def __init__(self, server: ChatServer, rubric: Questions, jobs: int = JOBS):
        self.server, self.rubric, self.jobs = server, rubric, jobs
        self.limits = rubric.scale
        self.name = f"openai:{server.model}@{fingerprint_values(server.address, rubric.fingerprint, ASKS)}"
        self.problem = ""
        self._missing = 0

    @property
    def missing(self) -> int:
        return self._missing

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        todo: SimpleQueue[tuple[int, str]] = SimpleQueue()
        for item in enumerate(texts):
            todo.put(item)
        done: SimpleQueue[Any] = SimpleQueue()  # outcomes, errors, and None for each worker that has ended
        stop, failure = Event(), None
        running = min(self.jobs, len(texts))
        for _ in range(running):
            Thread(target=self._work, args=(todo, done, stop), daemon=True).start()
        try:
            while running:  # also after a failure, since answers that are on their way are paid for
                found = done.get()
                if found is None:
                    running -= 1
                elif isinstance(found, BaseException):
                    failure = failure or found
                    stop.set()
                elif found.score is None:
                    self._missing += 1
                    self.problem = self.problem or found.problem
                    yield [], np.array([])
                else:
                    yield [found.position], np.array([found.score])
        finally:
            stop.set()
        if failure is not None:
            raise failure

    def _work(self, todo: "SimpleQueue[tuple[int, str]]", done: "SimpleQueue[Any]", stop: Event) -> None:
        """Score texts until there are none left, or until there is an error."""
        try:
            while not stop.is_set():
                position, text = todo.get_nowait()
                done.put(self._score(position, text, stop))
        except Empty:
            pass
        except BaseException as error:
            done.put(error)
        done.put(None)

    def _score(self, position: int, text: str, stop: Event) -> Outcome:
        messages = [{"role": "user", "content": self.rubric.question(text)}]
        answer = ""
        try:
            for _ in range(ASKS):
                answer = self.server.ask(messages, stop)
                score = self.rubric.find_score(answer)
                if score is not None:
                    return Outcome(position, score)
                said = answer[:LONGEST_ANSWER].strip() or "…"
                messages += [{"role": "assistant", "content": said}]
                messages += [{"role": "user", "content": self.rubric.reminder}]
        except RefusedError as error:
            return Outcome(position, None, f"the server refuses it: {error}")
        return Outcome(position, None, f"{answer[:100]!r} is not {self.rubric.demand}")


def load_rubric_judge(source: str) -> RubricJudge:
    """Load a judge from a text `MODEL#RUBRIC`; RUBRIC is the file of the rubric."""
    model, file = split_rubric(source)
    if not file:
        raise OptionError(f"the judge 'openai:{source}' has no rubric.", f"write openai:{model}#rubric.md.")
    return RubricJudge(find_server(model), read_rubric(file))
