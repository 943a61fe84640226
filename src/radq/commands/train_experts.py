"""radq train-experts --method dexperts --data reviews.csv --labels praise --backbone gpt2 --out experts"""

from dataclasses import dataclass

from radq.commands.runs import RunOptions, needs_training, read_defaults, settings_of, show_metrics
from radq.training.config import ExpertTrainingConfig


@dataclass
class Arguments(RunOptions, ExpertTrainingConfig):
    """Train the language models of the baselines DExperts and GeDi, on texts with labels."""


def defaults(argv: list[str]) -> Arguments:
    return read_defaults(argv, Arguments, ExpertTrainingConfig)


def run(arguments: Arguments) -> None:
    from radq.commands.console import announce
    from radq.training.run_folder import check_run

    settings = settings_of(arguments, ExpertTrainingConfig)
    check_run(settings, arguments.resume, arguments.overwrite)
    announce(f"loading {settings.backbone}", arguments.json)
    with needs_training():
        from radq.training.experts import train_experts
    metrics = train_experts(settings, arguments.resume, arguments.overwrite, progress=not arguments.json)
    show_metrics(f"{settings.method} → {settings.out}", metrics, arguments.json)
