"""The checks of a training run that need no model. Importing this module imports no torch, so mistakes show at once."""

from pathlib import Path

from radq.data.prompts import read_prompts
from radq.data.tables import check_sources
from radq.errors import OptionError
from radq.judges.classifier_names import check_classifier
from radq.sources.model_source import check_language_model, check_reward_model
from radq.training.run_config import TrainingConfig
from radq.training.run_folder import check_run_folder
from radq.training.teacher_names import check_teachers, needs_base

CHECKS = {
    "backbone": check_language_model,
    "init": check_reward_model,
    "teacher": check_teachers,
    "teacher_classifier": check_classifier,
    "base": check_language_model,
    "prompts": read_prompts,
}


def check_run(config: TrainingConfig, resume: bool, overwrite: bool) -> None:
    """Refuse a run that cannot begin, because of its settings, folder, models, or the columns of its data."""
    config.check()
    check_run_folder(Path(config.out), resume, overwrite)
    for option, check in CHECKS.items():
        name = getattr(config, option, "")  # runs of experts have neither teachers nor `init`, `base` and `prompts`
        if name:
            check(name)
    teacher = getattr(config, "teacher", "")
    if teacher and not getattr(config, "base", "") and needs_base(teacher):
        raise OptionError(f"the teacher {teacher!r} is no reward model, and needs a base.", "give --base.")
    check_sources([*config.data, *config.eval_data], config.columns, config.optional_columns)
