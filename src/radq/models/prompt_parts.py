"""Long prompts that are read in parts, so that other texts need not wait until all of a prompt is read.

    parts = PromptParts()
    while not parts.read(512, lambda: guide.start(input_ids, attention_mask)):
        ...                                             # other work, after each 512 tokens
    with parts.used():
        state = guide.start(input_ids, attention_mask)  # nothing is left to read

The same function is called again and again. Its readers go on where they stopped: each call of `Reader.read` is known
again by its number among the calls of the function.
"""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
Parts = Generator[int, None, T]  # reads a part of a prompt, and yields the number of its tokens; returns what it read

_USED: ContextVar["PromptParts | None"] = ContextVar("prompt_parts", default=None)


class _Stopped(Exception):  # noqa: N818 - it is no error
    """The tokens of a turn are used up."""


class PromptParts:
    """How far models have read some prompts."""

    def __init__(self) -> None:
        self.turn = sys.maxsize  # tokens of one part
        self._left = sys.maxsize  # tokens that may still be read
        self._calls = 0
        self._begun: dict[int, Parts[Any]] = {}
        self._read: dict[int, Any] = {}

    def read(self, tokens: int, work: Callable[[], Any]) -> bool:
        """Let the readers of a function read so many tokens; return whether they have read everything."""
        self.turn = self._left = tokens
        try:
            with self.used():
                work()
        except _Stopped:
            return False
        finally:
            self.turn = self._left = sys.maxsize
        return True

    @contextmanager
    def used(self) -> Iterator[None]:
        self._calls = 0
        token = _USED.set(self)
        try:
            yield
        finally:
            _USED.reset(token)

    def finish(self, parts: Parts[T]) -> T:
        """Return what the next call of a reader has read, if its turn is long enough."""
        number, self._calls = self._calls, self._calls + 1
        begun = self._begun.setdefault(number, parts)
        while number not in self._read:
            if self._left <= 0:
                raise _Stopped
            try:
                self._left -= next(begun)
            except StopIteration as end:
                self._read[number] = end.value
        return self._read[number]


def prompt_parts() -> PromptParts | None:
    """Return the parts that are read at the moment; None outside of a block that uses some."""
    return _USED.get()


def read_parts(parts: Parts[T]) -> T:
    """Read all parts of a prompt; if it is one of those that are read in turns, as many as a turn has room for."""
    if found := prompt_parts():
        return found.finish(parts)
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value
