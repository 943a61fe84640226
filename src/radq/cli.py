"""The command line. One module per command, imported when the command runs, so that help is instant.

Errors a user can act on become one line on standard error and exit code 2.
"""

import importlib
import os
import sys
from collections.abc import Sequence

import radq

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
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"radq {radq.__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        return _fail(f"there is no command {name!r}. hint: choose one of {', '.join(COMMANDS)}.")
    # Threads of torch that wait for a core in use spin by default, and small steps then take ten times as long. OpenMP
    # reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return _run(name, rest)


def _run(name: str, argv: list[str]) -> int:
    import tyro

    from radq.errors import RadqError

    command = importlib.import_module(f"radq.commands.{name.replace('-', '_')}")
    try:
        options = {"default": command.defaults(argv)} if hasattr(command, "defaults") else {}
        command.run(tyro.cli(command.Arguments, prog=f"radq {name}", args=argv, **options))
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        return 0
    except (RadqError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


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
