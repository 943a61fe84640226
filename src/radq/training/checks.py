"""The checks of a training run that need no model, and teachers written as text.

A teacher is a list of folders of reward models, or of guides with numbers, separated by commas. Importing this module
imports no torch, so that a mistake shows at once.
"""

from pathlib import Path

from radq.data.prompts import read_prompts
from radq.data.tables import check_sources
from radq.errors import OptionError
from radq.guides.spec import GUIDES, GuideSpec
from radq.judges.classifier_names import check_classifier
from radq.sources.embedded import EMBEDDED
from radq.sources.model_source import check_language_model, check_reward_model
from radq.training.config import TrainingConfig
from radq.training.run_folder import check_run_folder

# --- teachers ---


def split_teachers(text: str) -> list[str]:
    """Split a list of teachers at its commas, but not at those between the numbers of a guide: DIR:a=1,b=2."""
    if Path(text).is_dir():
        return [text]
    teachers: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if not part:
            raise OptionError(
                f"teacher must name folders, separated by commas, got {text!r}.", "remove the superfluous commas."
            )
        if teachers and ":" not in part and is_guide(f"{teachers[-1]},{part}"):
            teachers[-1] += f",{part}"
        else:
            teachers.append(part)
    return teachers


def is_guide(name: str) -> bool:
    """Whether a teacher is written as a guide with numbers, such as DIR:alpha=2."""
    try:
        GuideSpec.parse(name)
    except OptionError:
        return False
    return True


def check_teachers(text: str) -> None:
    """Refuse teachers that cannot be loaded; only their config.json is read."""
    for name in split_teachers(text):
        if is_guide(name):
            GuideSpec.parse(name).check()
        else:
            check_reward_model(name)


def find_reward_models(name: str) -> list[tuple[str, list[str]]] | None:
    """Find the reward models of which a teacher consists, each with the names of its attributes that count.

    An empty list of names stands for all attributes. The result is None if the teacher is another guide, such as
    experts.
    """
    if not is_guide(name):
        return [(name, [])]
    guide = GuideSpec.parse(name)
    if guide.kind is GUIDES["embedded"]:
        return [(f"{EMBEDDED}:{attribute}", [attribute]) for attribute in guide.settings]
    return [(guide.folder, list(guide.settings))] if guide.kind is GUIDES["reward"] else None


def needs_base(text: str) -> bool:
    """Whether one of the teachers is no reward model.

    The range of its rewards is not stored anywhere, and is found from the rewards of a base model's candidates.
    """
    return any(find_reward_models(name) is None for name in split_teachers(text))


# --- runs ---

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
