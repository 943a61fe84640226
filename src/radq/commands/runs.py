"""Parts that the training commands share: options, defaults from YAML, and the metrics at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from radq.settings import read_yaml
from radq.training.config import TrainingConfig


@dataclass
class RunOptions:
    """Options of a training command that are not settings of the training itself."""

    config: Path | None = None
    """YAML file with any of these options; options on the command line replace its values."""
    resume: bool = False
    """Continue the run in --out from its last checkpoint, with its settings."""
    overwrite: bool = False
    """Delete the run that --out holds and start again."""
    json: bool = False
    """Print the final metrics as JSON, without progress."""


Settings = TypeVar("Settings", bound=TrainingConfig)


def read_defaults(argv: list[str], arguments: type[Any], settings: type[TrainingConfig]) -> Any:
    """Read the defaults of the options from the YAML file of --config, or from the run that is to be resumed."""
    given = _option(argv, "--config")
    out = _option(argv, "--out")
    if given is None and "--resume" in argv and out is not None and (Path(out) / "config.yaml").is_file():
        given = str(Path(out) / "config.yaml")
    return arguments() if given is None else arguments(**vars(read_yaml(given, settings)), config=Path(given))


def settings_of(arguments: Any, settings: type[Settings]) -> Settings:
    """The settings of the training, without the options of the command."""
    return settings(**{option.name: getattr(arguments, option.name) for option in fields(settings)})


@contextmanager
def needs_training() -> Iterator[None]:
    """Explain an import that fails inside the block: training needs packages that radq can be installed without."""
    from radq.errors import ModelError, install_hint

    try:
        yield
    except ImportError as error:
        raise ModelError(f"training needs the package {error.name}.", install_hint("train")) from error


def show_metrics(title: str, metrics: dict[str, float], as_json: bool) -> None:
    """Print the metrics of a run, in one process only."""
    from radq.commands.console import is_first_process, print_json

    if not is_first_process():
        return
    if as_json:
        print_json(metrics)
    else:
        print(title)
        for name, value in metrics.items():
            print(f"  {name:<28} {value:.5g}")


def _option(argv: list[str], name: str) -> str | None:
    """Find the value of an option that is written as `--name value` or `--name=value`."""
    for position, argument in enumerate(argv):
        if argument == name and position + 1 < len(argv):
            return argv[position + 1]
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
    return None
