"""The command line. The module of a command is imported when the command runs, so that `radq --help` is instant.

Errors that a user can act on (wrong values, files that cannot be read or written, full memory or disk) are one line on
standard error, with exit code 2. Any other error is a bug of radq and shows its traceback.
"""

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from functools import reduce
from operator import or_
from types import ModuleType
from typing import Annotated, Any

import radq
from radq.errors import explain

COMMANDS = {
    "demo": "compare texts of a small language model with and without steering",
    "generate": "steer a language model with reward models",
    "serve": "serve a language model over HTTP, steered in each request, with a page",
    "score": "score the tokens of a text, or all texts of a table",
    "train": "train a reward model on labelled texts",
    "distill": "train a fast RAD-Q on the rewards of a slow RAD-V",
    "rank": "say whether RAD-Q can fit a data set; measure the rank of a trained model",
    "train-experts": "train the language models that the baselines DExperts and GeDi need",
    "eval": "generate, judge and measure texts for a grid of guides; measure other texts; answer questions",
    "calibrate": "find strengths from 0 to 1 of a reward model, which an independent judge confirms",
    "judge": "score texts with a judge, such as a language model with a rubric, as labels; fit a judge on labels",
    "report": "make plots, tables and a page from measured sweeps",
    "bench": "measure the time per token of all guides",
    "convert": "turn a checkpoint of the public RAD or rad-q code into a reward model",
}
# The module in radq.commands and the arguments of a command; those of others are <name>:Arguments.
HOMES = {"distill": "train:DistillArguments", "train-experts": "train:ExpertArguments"}
# Words of the last release, which go on working with a note.
OLD_COMMANDS = {"label": "judge score", "measure": "eval measure", "choices": "eval choices"}
OLD_OPTIONS = {
    "generate": {"--num-samples": "--samples"},
    "demo": {"--num-samples": "--samples"},
    "score": {"--text-column": "--text", "--prompt-column": "--prompt"},
    "judge": {"--column": "--text"},
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        code = 0
    except KeyboardInterrupt as error:
        if message := explain(error):
            print(message, file=sys.stderr)
        code = 130
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        code = _fail(message)
    _settle_output()
    return code


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"radq {radq.__version__}")
        return 0
    name, *rest = rename_old_words(argv)
    if name not in COMMANDS:
        return _fail(f"there is no command {name!r}. hint: choose one of {', '.join(COMMANDS)}.")
    for argument in rest:
        # These characters stand for bytes that are not UTF-8.
        if any("\ud800" <= character <= "\udfff" for character in argument):
            return _fail(f"arguments must be UTF-8, got {argument!r}. hint: write it in UTF-8, or rename the file.")
    from radq.commands.console import limit_threads  # not for `radq --help`

    # By default, threads of torch that wait for a busy core spin, and small steps then take ten times as long. OpenMP
    # reads this variable when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    limit_threads()
    told: set[str] = set()

    def format_warning(message: Warning | str, *_: object, **__: object) -> str:
        """Write a warning in one line, without the line of code that raised it, and each line once."""
        line = f"warning: {message}\n"
        again = line in told
        told.add(line)
        return "" if again else line

    warnings.formatwarning = format_warning
    # torch warns with a C++ stack trace that a CPU without bfloat16 is slower; the results are right.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS")
    import tyro

    from radq.settings import check_ranges

    kind, run, command = find_command(name)
    if hasattr(command, "SUBCOMMANDS") and rest and rest[0].startswith("--") and rest[0] != "--help":
        rest = [next(iter(command.SUBCOMMANDS)), *rest]  # `radq eval --config` is `radq eval sweep --config`
    options = {"default": command.defaults(kind, rest)} if hasattr(command, "defaults") else {}
    arguments = tyro.cli(kind, prog=f"radq {name}", args=rest, **options)
    check_ranges(arguments)
    run(arguments)
    return 0


def find_command(name: str) -> tuple[Any, Any, ModuleType]:
    """The arguments of a command, which are a union where it has subcommands, the function that runs it, its module."""
    module, _, arguments = HOMES.get(name, f"{name}:Arguments").partition(":")
    command = importlib.import_module(f"radq.commands.{module}")
    if not hasattr(command, "SUBCOMMANDS"):
        return getattr(command, arguments), command.run, command
    import tyro

    parts: Any = [Annotated[kind, tyro.conf.subcommand(word)] for word, (kind, _) in command.SUBCOMMANDS.items()]
    runs = dict(command.SUBCOMMANDS.values())
    return reduce(or_, parts), lambda arguments: runs[type(arguments)](arguments), command


def rename_old_words(argv: list[str]) -> list[str]:
    """Replace words of the last release by those of this one, each with a note."""
    command = OLD_COMMANDS.get(argv[0], argv[0])
    changes = {f"radq {argv[0]}": f"radq {command}"} if argv[0] in OLD_COMMANDS else {}
    words = [*command.split(), *argv[1:]]
    start = 2 if words[0] == "judge" else 1
    renamed = OLD_OPTIONS.get(words[0], {})
    takes_texts = words[0] == "score" or words[:2] == ["judge", "score"]
    if takes_texts and not any(word == "--data" or word.startswith("--data=") for word in words):
        renamed = renamed | {"--text": ""}  # a column is named beside --data alone
    kept, texts, rest = words[:start], [], iter(words[start:])
    for word in rest:
        option, equals, value = word.partition("=")
        option = option.replace("_", "-")
        if option not in renamed:
            kept.append(word)
            continue
        changes[option] = new = renamed[option]
        if new:
            kept.append(f"{new}{equals}{value}")
        else:
            texts.append(value if equals else next(rest, ""))
    for old, new in changes.items():
        told = f"is now `{new}`" if new else "now names the column of --data; a text needs no option before it"
        print(f"note: `{old}` {told}.", file=sys.stderr)
    return [*kept[:start], *texts, *kept[start:]]


def _prepare_streams() -> None:
    """Let both streams take any text: replace a closed one by /dev/null and escape characters it cannot write."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _settle_output() -> None:
    """Flush standard output; if that fails, point it to /dev/null, so that Python does not complain when it exits."""
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
    commands = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return f"""usage: radq COMMAND …

radq {radq.__version__}: a small reward model steers a large frozen language model, token by token.

commands:
{commands}

`radq COMMAND --help` lists the options of a command. The variable RADQ_THREADS sets the number of threads."""
