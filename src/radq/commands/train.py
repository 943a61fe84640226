"""radq train --data reviews.csv --labels praise --backbone embedded --out praise"""

from dataclasses import dataclass

from radq.commands.runs import RunOptions, needs_training, read_defaults, settings_of, show_metrics
from radq.training.config import RewardTrainingConfig


@dataclass
class Arguments(RunOptions, RewardTrainingConfig):
    """Train a reward model on texts with labels, or on pairs of texts of which one is preferred. Settings that are left
    open are chosen from the data, the backbone and the device (--recipe)."""


def defaults(argv: list[str]) -> Arguments:
    return read_defaults(argv, Arguments, RewardTrainingConfig)


def run(arguments: Arguments) -> None:
    from radq.commands.console import announce
    from radq.training.run_folder import check_run

    settings = settings_of(arguments, RewardTrainingConfig)
    check_run(settings, arguments.resume, arguments.overwrite)
    announce(f"loading {settings.init or settings.backbone or settings.teacher}", arguments.json)
    with needs_training():
        from radq.training.reward import train
    metrics = train(settings, arguments.resume, arguments.overwrite, progress=not arguments.json)
    show_metrics(f"{'RAD-Q' if settings.kind == 'q' else 'RAD-V'} → {settings.out}", metrics, arguments.json)
    show_outcome(settings, metrics, arguments.json)


def show_outcome(settings: RewardTrainingConfig, metrics: dict[str, float], as_json: bool) -> None:
    """Say what the figures mean, and which commands come next."""
    from radq.commands.console import is_first_process
    from radq.sources.model_source import ModelSource
    from radq.training.outcome import BETA, PAIR_BETA, describe_outcome, next_commands

    if as_json or not is_first_process():
        return
    stored = ModelSource.find(settings.out).config
    attributes = stored["attributes"]
    print(*describe_outcome(metrics, attributes, "token" if settings.spans else "text"), sep="\n")
    low, high = stored["response_range"] if settings.compares else (0.0, 0.0)
    beta = PAIR_BETA / (high - low) if high > low else BETA
    print("next:", *next_commands(settings, attributes, beta), sep="\n  ")
