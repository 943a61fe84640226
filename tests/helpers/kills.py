"""Kill a radq command at a chosen moment.

A run is killed by SIGKILL right after the n-th call of the named function has returned, so that the moment depends on
the work done and not on the clock. Each run is a fork of the test's process, which has imported everything already.
"""

import functools
import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from radq.cli import main


def fork(work: Callable[[], int]) -> int:
    """Run work in a fork of this process, and return the fork's process id; work's result is its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where other threads wait for messages
        child = os.fork()
    if child == 0:
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)
    return child


def wait_for(child: int) -> int:
    """The exit code of a fork; negative after a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def find(place: str) -> tuple[Any, str]:
    """Find the module or class that holds `module:name` or `module:Class.name`, and the last name."""
    module, _, path = place.partition(":")
    *parents, name = path.split(".")
    return functools.reduce(getattr, parents, importlib.import_module(module)), name


def kill_after(function: str, calls: int) -> None:
    """Wrap a function so that the process is killed at the end of its n-th call."""
    owner, name = find(function)
    original, count = getattr(owner, name), 0

    def replacement(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        result = original(*arguments, **options)
        count += 1
        if count == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, replacement)


def run_and_kill(function: str, calls: int, argv: list[str]) -> None:
    """Run a command in a fork that dies after the n-th call of `module:name` or `module:Class.name`."""

    def work() -> int:
        kill_after(function, calls)
        return main(argv)

    status = wait_for(fork(work))
    assert status == -signal.SIGKILL, f"{function} was called less than {calls} times; the run ended with {status}"
