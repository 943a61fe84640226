"""radq train --data reviews.csv --labels praise --backbone gpt2 --out praise"""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from radq.settings import RewardTrainingConfig, load_settings


@dataclass
class Arguments(RewardTrainingConfig):
    """Train a reward model on texts and responses. The defaults are the paper's recipe."""

    config: Path | None = None
    """YAML file with any of these options; flags win."""
    resume: bool = False
    """Go on from the last checkpoint of the run in --out, with its settings."""
    overwrite: bool = False
    """Start anew in a folder that holds a run."""
    json: bool = False
    """Print the final metrics as JSON, and no progress."""


def defaults(argv: list[str]) -> Arguments:
    """What the YAML file says, or the run that is to be resumed."""
    given = _option(argv, "--config")
    out = _option(argv, "--out")
    if given is None and "--resume" in argv and out is not None and (Path(out) / "config.yaml").is_file():
        given = str(Path(out) / "config.yaml")
    return Arguments() if given is None else Arguments(**_values(load_settings(given)), config=Path(given))


def run(arguments: Arguments) -> None:
    from radq.commands.console import print_json
    from radq.errors import ModelError

    try:
        from radq.runs import train
    except ImportError as error:
        raise ModelError(f"training needs the package {error.name}.", "pip install 'radq[train]'.") from error
    settings = RewardTrainingConfig(**_values(arguments))
    metrics = train(settings, arguments.resume, arguments.overwrite, progress=not arguments.json)
    if int(os.environ.get("RANK", 0)) > 0:
        return  # of several processes, one speaks
    if arguments.json:
        print_json(metrics)
    else:
        print(f"{'RAD-Q' if settings.kind == 'q' else 'RAD-V'} → {settings.out}")
        for name, value in metrics.items():
            print(f"  {name:<28} {value:.5g}")


def _values(settings: RewardTrainingConfig) -> dict[str, Any]:
    return {option.name: getattr(settings, option.name) for option in fields(RewardTrainingConfig)}


def _option(argv: list[str], name: str) -> str | None:
    """`--name value` or `--name=value`."""
    for position, argument in enumerate(argv):
        if argument == name and position + 1 < len(argv):
            return argv[position + 1]
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
    return None
