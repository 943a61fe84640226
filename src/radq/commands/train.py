"""Training runs of reward models, and of the language models of the baselines DExperts and GeDi.

radq train --data reviews.csv --labels praise --backbone embedded --out praise
radq distill --teacher DIR --data reviews.csv --base gpt2-large --backbone gpt2 --out student
radq train-experts --method dexperts --data reviews.csv --labels praise --backbone gpt2 --out experts
"""

from argparse import ArgumentParser
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from radq.commands.console import announce, is_first_process, print_json
from radq.errors import ModelError, OptionError, install_hint
from radq.settings import read_yaml
from radq.training.config import ExpertTrainingConfig, RewardTrainingConfig, TrainingConfig


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


@dataclass
class Arguments(RunOptions, RewardTrainingConfig):
    """Train a reward model on texts with labels, or on pairs of texts of which one is preferred. Settings that are left
    open are chosen from the data, the backbone and the device (--recipe)."""


@dataclass
class DistillArguments(Arguments):
    """Train a RAD-Q on the rewards of a teacher: of the tokens of texts and, with --base, of the candidates that a
    language model has for the next tokens of texts of its own. Labels are not needed; if given, they are used in the
    evaluation. A classifier may be the teacher, too (--teacher-classifier)."""


@dataclass
class ExpertArguments(RunOptions, ExpertTrainingConfig):
    """Train the language models of the baselines DExperts and GeDi, on texts with labels."""


def defaults(kind: type[Any], argv: list[str]) -> Any:
    """Read the defaults of the options from the YAML file of --config, or from the run that is to be resumed."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--config", "--out"):
        parser.add_argument(option, nargs="?")
    options, _ = parser.parse_known_args(argv)
    given, resumed = options.config, Path(options.out or "") / "config.yaml"
    if given is None and "--resume" in argv and options.out and resumed.is_file():
        given = str(resumed)
    return kind() if given is None else kind(**vars(read_yaml(given, _settings_kind(kind))), config=Path(given))


def _settings_kind(kind: type[Any]) -> type[TrainingConfig]:
    return ExpertTrainingConfig if issubclass(kind, ExpertTrainingConfig) else RewardTrainingConfig


def run(arguments: Arguments | ExpertArguments) -> None:
    from radq.training.run_folder import check_run

    kind = _settings_kind(type(arguments))
    settings: Any = kind(**{option.name: getattr(arguments, option.name) for option in fields(kind)})
    if isinstance(arguments, DistillArguments) and not arguments.has_teacher:
        raise OptionError(
            "there is no teacher.", "give the folder of a RAD-V as --teacher DIR, or --teacher-classifier NAME."
        )
    check_run(settings, arguments.resume, arguments.overwrite)
    rewards = isinstance(settings, RewardTrainingConfig)
    model = (settings.init or settings.backbone or settings.teacher) if rewards else settings.backbone
    announce(f"loading {model}", arguments.json)
    try:
        if rewards:
            from radq.training.reward import train
        else:
            from radq.training.experts import train_experts as train
    except ImportError as error:
        raise ModelError(f"training needs the package {error.name}.", install_hint("train")) from error
    metrics = train(settings, arguments.resume, arguments.overwrite, progress=not arguments.json)
    if not is_first_process():
        return
    if arguments.json:
        print_json(metrics)
        return
    print(f"{f'RAD-{settings.kind.upper()}' if rewards else settings.method} → {settings.out}")
    for name, value in metrics.items():
        print(f"  {name:<28} {value:.5g}")
    if rewards:
        _print_outcome(settings, metrics)


def _print_outcome(settings: RewardTrainingConfig, metrics: dict[str, float]) -> None:
    """Say what the figures mean, and which commands come next."""
    from radq.sources.model_source import ModelSource
    from radq.training.outcome import BETA, PAIR_BETA, describe_outcome, next_commands

    stored = ModelSource.find(settings.out).config
    attributes = stored["attributes"]
    print(*describe_outcome(metrics, attributes, "token" if settings.spans else "text"), sep="\n")
    low, high = stored["response_range"] if settings.compares else (0.0, 0.0)
    beta = PAIR_BETA / (high - low) if high > low else BETA
    print("next:", *next_commands(settings, attributes, beta), sep="\n  ")
