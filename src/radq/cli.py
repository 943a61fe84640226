"""The command line. One module per command, imported when the command runs, so that help is instant.

Errors a user can act on become one line on standard error and exit code 2: wrong values, files that cannot be read or
written, a full memory or disk. Any other error is a bug of radq and shows its traceback.
"""

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

import radq
from radq.errors import explain

COMMANDS = {  # name: what it does; the module is radq.commands.<name>, with _ for -
    "demo": "steer a real language model that pip installs, and compare",
    "generate": "steer a language model with reward models",
    "score": "show the reward of every token of a text",
    "train": "train a reward model on texts and responses",
    "distill": "train a fast RAD-Q on the rewards of a slow RAD-V",
    "rank": "say what keeps RAD-Q from fitting a data set; ranks of trained models",
    "train-experts": "train the language models of the rivals DExperts and GeDi",
    "eval": "sweep guides over prompts: generations, judges, metrics",
    "measure": "metrics of generations that are there already",
    "judge": "score texts with a judge, or fit a judge on labelled texts",
    "report": "plots, tables and a page from what was measured",
    "convert": "turn weights of the public RAD and rad-q code into a reward model",
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        code = 0
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        code = _fail(message)
    _settle_output()
    return code


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"radq {radq.__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        return _fail(f"there is no command {name!r}. hint: choose one of {', '.join(COMMANDS)}.")
    for argument in rest:
        if any("\ud800" <= character <= "\udfff" for character in argument):  # as Python reads bytes that are no UTF-8
            return _fail(f"the argument {argument!r} is no UTF-8. hint: write it in UTF-8, or rename the file.")
    # Threads of torch that wait for a core in use spin by default, and small steps then take ten times as long. OpenMP
    # reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"  # without the line of code it stands on
    # A CPU without bfloat16 computes as well, only slower; torch says so with a C++ stack trace.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS")
    _run_command(name, rest)
    return 0


def _run_command(name: str, argv: list[str]) -> None:
    import tyro

    command = importlib.import_module(f"radq.commands.{name.replace('-', '_')}")
    options = {"default": command.defaults(argv)} if hasattr(command, "defaults") else {}
    command.run(tyro.cli(command.Arguments, prog=f"radq {name}", args=argv, **options))


def _prepare_streams() -> None:
    """Streams that take any text: a closed one becomes nothing, and characters that one cannot write are escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _settle_output() -> None:
    """Write what standard output still holds; where that fails it goes nowhere, or Python complains when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return f"""usage: radq COMMAND …

radq {radq.__version__}: a small reward model steers a large frozen language model, token by token.

commands:
{commands}

`radq COMMAND --help` lists the options of a command."""
