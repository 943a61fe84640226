"""radq train --data reviews.csv --labels praise --backbone gpt2 --out praise"""

from dataclasses import dataclass

from radq.commands.runs import RunOptions, needs_training, read_defaults, settings_of, show_metrics
from radq.training.config import RewardTrainingConfig


@dataclass
class Arguments(RunOptions, RewardTrainingConfig):
    """Train a reward model on texts with labels. The defaults are those of the paper."""


def defaults(argv: list[str]) -> Arguments:
    return read_defaults(argv, Arguments, RewardTrainingConfig)


def run(arguments: Arguments) -> None:
    from radq.commands.console import announce
    from radq.training.checks import check_run

    settings = settings_of(arguments, RewardTrainingConfig)
    check_run(settings, arguments.resume, arguments.overwrite)
    announce(f"loading {settings.init or settings.backbone or settings.teacher}", arguments.json)
    with needs_training():
        from radq.training.reward import train
    metrics = train(settings, arguments.resume, arguments.overwrite, progress=not arguments.json)
    show_metrics(f"{'RAD-Q' if settings.kind == 'q' else 'RAD-V'} → {settings.out}", metrics, arguments.json)
