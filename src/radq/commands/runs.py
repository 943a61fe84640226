"""What the commands that train have in common: options, their defaults from YAML, the metrics at the end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from radq.training.config import TrainingConfig, load_settings


@dataclass
class RunOptions:
    config: Path | None = None
    """YAML file with any of these options; flags win."""
    resume: bool = False
    """Go on from the last checkpoint of the run in --out, with its settings."""
    overwrite: bool = False
    """Start anew in a folder that holds a run."""
    json: bool = False
    """Print the final metrics as JSON, and no progress."""


Settings = TypeVar("Settings", bound=TrainingConfig)


def read_defaults(argv: list[str], arguments: type[Any], settings: type[TrainingConfig]) -> Any:
    """What the YAML file says, or the run that is to be resumed."""
    given = _option(argv, "--config")
    out = _option(argv, "--out")
    if given is None and "--resume" in argv and out is not None and (Path(out) / "config.yaml").is_file():
        given = str(Path(out) / "config.yaml")
    return arguments() if given is None else arguments(**vars(load_settings(given, settings)), config=Path(given))


def settings_of(arguments: Any, settings: type[Settings]) -> Settings:
    return settings(**{option.name: getattr(arguments, option.name) for option in fields(settings)})


@contextmanager
def needs_training() -> Iterator[None]:
    """Around the import of what trains."""
    from radq.errors import ModelError

    try:
        yield
    except ImportError as error:
        raise ModelError(f"training needs the package {error.name}.", "pip install 'radq[train]'.") from error


def show_metrics(title: str, metrics: dict[str, float], as_json: bool) -> None:
    from radq.commands.console import print_json

    if int(os.environ.get("RANK", 0)) > 0:
        return  # of several processes, one speaks
    if as_json:
        print_json(metrics)
    else:
        print(title)
        for name, value in metrics.items():
            print(f"  {name:<28} {value:.5g}")


def _option(argv: list[str], name: str) -> str | None:
    """`--name value` or `--name=value`."""
    for position, argument in enumerate(argv):
        if argument == name and position + 1 < len(argv):
            return argv[position + 1]
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
    return None
