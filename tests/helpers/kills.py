"""Run a radq command again and again, and kill each run at a chosen moment; a script, not a test.

    python kills.py '{"values": {…}, "kills": [["radq.evaluation.sweep.generate:append_lines", 3], …]}' eval --config …

A run is killed by SIGKILL right after the n-th call of the named function has returned, so that the moment depends on
the work done and not on the clock. `values` are set before. torch is imported once; each run is a fork of this process.
"""

import functools
import importlib
import json
import os
import signal
import sys
from typing import Any

import transformers  # noqa: F401  # so that the forks need not import it

from radq.cli import main


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
    child = os.fork()
    if child == 0:
        kill_after(function, calls)
        os._exit(main(argv))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == -signal.SIGKILL, f"{function} was called less than {calls} times; the run ended with {status}"


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    for place, value in plan["values"].items():
        setattr(*find(place), value)
    for function, calls in plan["kills"]:
        run_and_kill(function, calls, sys.argv[2:])
