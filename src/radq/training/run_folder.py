"""The beginning and the folder of a training run: checks that need no model, its files, and how it may be resumed.

config.yaml holds the settings. fingerprints.json holds fingerprints of the contents that a run depends on: data,
evaluation data, teacher, base, prompts, frozen weights, and the files of the models. labels.json says how the labels of
each column became numbers. A checkpoint has checksums, with which it is checked before a run goes on from it. Importing
this module imports no torch, so that a mistake shows at once.
"""

import contextlib
import json
import shutil
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml

from radq.data.label_scale import KEPT, LabelScale, read_scale
from radq.data.prompts import read_prompts
from radq.data.tables import check_sources
from radq.errors import ModelError, OptionError
from radq.files import MODEL_FILES, RUN_FILES, atomic_file, explained_writing, require_own_folder
from radq.guides.folders import ANTI_EXPERT, EXPERT
from radq.guides.spec import GuideSpec
from radq.judges.classifiers import check_classifier
from radq.settings import read_yaml
from radq.sources.model_source import check_language_model, check_reward_model
from radq.training.config import TrainingConfig

if TYPE_CHECKING:
    from radq.models.config import RewardModelConfig

Config = TypeVar("Config", bound=TrainingConfig)

SETTINGS, FINGERPRINTS = RUN_FILES
LABELS = "labels.json"
CHECKSUMS = "checksums.json"
STATE = "trainer_state.json"
BYTES_PER_READ = 2**24
RESULTS = "results.json"  # the metrics of a run that has ended
KEY_SETTINGS = {"data", "labels", "out", "backbone", "batch_size", "learning_rate", "save_steps"}  # of every run
FINGERPRINTED = (  # a resumed run may name them otherwise
    *("data", "eval_data", "teacher", "teacher_classifier", "backbone", "base", "prompts"),
    *("init", "backbone_files", "base_files"),
)
LATER = ("backbone", "init", "backbone_files", "base_files")  # which an older radq did not keep of every run
CHANGEABLE = (
    *("out", "cache", "log_steps", "save_steps", "save_minutes", "report_to", "micro_batch_size"),
    *("gradient_checkpointing", "capture_steps", "cache_states"),
)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a training run of radq, finished or not."""
    try:
        stored = yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    return isinstance(stored, dict) and stored.keys() >= KEY_SETTINGS


def take_settings_of_run(out: Path, config: Config) -> Config:
    """Take settings that are open from the run that is resumed, for which they were chosen when it began."""
    if not is_run(out):
        return config
    begun = _read_settings(out, type(config))
    chosen = {option.name: getattr(begun, option.name) for option in fields(config)}
    return replace(config, **{name: value for name, value in chosen.items() if getattr(config, name) is None})


def begin_run(
    out: Path, config: TrainingConfig, contents: dict[str, str], scales: Sequence[LabelScale], resume: bool
) -> None:
    """Write settings, fingerprints and scales of labels; unless the run is resumed, delete an earlier run first."""
    with explained_writing(out):
        out.mkdir(parents=True, exist_ok=True)
        if not resume:
            delete_run(out)
        with atomic_file(out / LABELS) as file:  # before the settings, which make a folder a run
            stored = {name: asdict(scale) for name, scale in zip(config.attributes, scales, strict=True)}
            file.write_text(json.dumps(stored, ensure_ascii=False), encoding="utf-8")
        with atomic_file(out / SETTINGS) as file:
            file.write_text(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
        with atomic_file(out / FINGERPRINTS) as file:
            file.write_text(json.dumps(contents))


def delete_run(out: Path) -> None:
    """Delete an earlier run's checkpoints, metrics, targets, candidates and models; other files stay."""
    for folder in (*find_checkpoints(out), out / "targets", out / "candidates", out / EXPERT, out / ANTI_EXPERT):
        shutil.rmtree(folder, ignore_errors=True)
    for path in (path for pattern in ("metrics.jsonl", RESULTS, *MODEL_FILES) for path in out.glob(pattern)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def check_resumed(out: Path, config: TrainingConfig, contents: dict[str, str], resume: bool) -> None:
    """Refuse to resume a run with other data or other settings; the error names the changes."""
    if not resume or not is_run(out):
        return
    begun, known = _read_settings(out, type(config)), {}
    with contextlib.suppress(OSError, ValueError, TypeError):  # a run that an older radq began
        known = dict(json.loads((out / FINGERPRINTS).read_text()))
    changed = [
        f"{option.name} from {getattr(begun, option.name)!r} to {getattr(config, option.name)!r}"
        for option in fields(config)
        if option.name not in CHANGEABLE
        and not (option.name in FINGERPRINTED and option.name in known)
        and getattr(begun, option.name) != getattr(config, option.name)
    ]
    if known:
        known = {name: contents.get(name) for name in LATER} | known
        changed += [f"the contents of {name}" for name in FINGERPRINTED if known.get(name) != contents.get(name)]
    if changed:
        raise OptionError(
            f"the run in {str(out)!r} cannot go on: {'; '.join(changed)} changed.",
            f"give the values it began with, or delete it with --overwrite; only {', '.join(CHANGEABLE)} may change.",
        )


def _read_settings(out: Path, kind: type[Config]) -> Config:
    try:
        return read_yaml(out / SETTINGS, kind)
    except OptionError as error:
        raise OptionError(
            f"another command began the run in {str(out)!r}: {error.message}",
            "resume it with the command that began it.",
        ) from error


def read_scales(out: Path, config: TrainingConfig) -> list[LabelScale] | None:
    """Read the scales of the labels of a run, one per column; None if the data or --label-range decide.

    Runs that an older radq began store none: it used numbers as they were.
    """
    file = out / LABELS
    if not file.exists():
        return [KEPT] * len(config.attributes) if is_run(out) and config.label_range is None else None
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        return [read_scale(stored[name], str(file)) for name in config.attributes]
    except (KeyError, TypeError, ValueError):
        return None  # other columns or a damaged file; fingerprints tell if the labels are others


def scales_of_model(config: "RewardModelConfig", source: str) -> list[LabelScale | None]:
    """The scales of the labels that a reward model was trained on, one per attribute; None for an unknown one.

    Models of earlier versions store none; where their labels lay outside [0, 1], they were used as they were.
    """
    if config.label_scales is None:
        return [None if limits == (0.0, 1.0) else KEPT for limits in config.attribute_ranges]
    if len(config.label_scales) != len(config.attributes):
        raise ModelError(f"{source!r} has scales for other labels than its attributes.", "train the model again.")
    return [read_scale(stored, source) for stored in config.label_scales]


# --- checkpoints ---


def find_checkpoints(run: str | Path) -> list[Path]:
    """Find the checkpoints of a run, oldest first."""
    checkpoints = [path for path in Path(run).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of all files of a checkpoint, with which `find_damage` compares them later."""
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    sums = {file.relative_to(checkpoint).as_posix(): _checksum(file) for file in files}
    (checkpoint / CHECKSUMS).write_text(json.dumps(sums))


def find_damage(checkpoint: Path) -> str | None:
    """Describe the damage of a checkpoint; None if there is none, or if an older radq wrote it without checksums."""
    try:
        state = json.loads((checkpoint / STATE).read_text())
        sums = json.loads((checkpoint / CHECKSUMS).read_text()) if (checkpoint / CHECKSUMS).exists() else {}
        wrong = [name for name, known in sums.items() if _checksum(checkpoint / name) != known]
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    if wrong:
        return f"{wrong[0]} has changed since it was written"
    if step := state.get("best_global_step"):
        best = checkpoint.with_name(f"checkpoint-{step}")
        if best != checkpoint and (damage := find_damage(best)):
            return f"its best checkpoint so far, {best.name}, is damaged: {damage}"
    return None


def find_resumed_checkpoint(out: Path, resume: bool) -> Path | None:
    """Find the newest checkpoint without damage, from which a run goes on; None if it starts at the beginning.

    A warning names damaged checkpoints, or says that a run that is to be resumed has none.
    """
    damaged: list[str] = []
    for checkpoint in reversed(find_checkpoints(out)) if resume else ():
        damage = find_damage(checkpoint)
        if damage is None:
            if damaged:
                warnings.warn(f"{'; '.join(damaged)}. The run goes on from {checkpoint.name}.", stacklevel=2)
            return checkpoint
        damaged.append(f"{checkpoint} is damaged ({damage})")
    if damaged:
        raise ModelError(f"{'; '.join(damaged)}.", "no checkpoint is left to go on from; start again with --overwrite.")
    if resume:
        warnings.warn(f"{str(out)!r} has no checkpoint to go on from: training starts at the beginning.", stacklevel=2)
    return None


def _checksum(file: Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while piece := stream.read(BYTES_PER_READ):
            total = zlib.crc32(piece, total)
    return total


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
        if teachers and ":" not in part and parse_guide(f"{teachers[-1]},{part}") is not None:
            teachers[-1] += f",{part}"
        else:
            teachers.append(part)
    return teachers


def parse_guide(name: str) -> GuideSpec | None:
    """Parse a teacher that is written as a guide with numbers, such as DIR:alpha=2; None if it is written otherwise."""
    with contextlib.suppress(OptionError):
        return GuideSpec.parse(name)


def check_teachers(text: str) -> None:
    """Refuse teachers that cannot be loaded; only their config.json is read."""
    for name in split_teachers(text):
        guide = parse_guide(name)
        check_reward_model(name) if guide is None else guide.check()


def find_reward_models(name: str) -> list[tuple[str, list[str]]] | None:
    """Find the reward models of which a teacher consists, each with the names of its attributes that count.

    An empty list of names stands for all attributes. The result is None if the teacher is another guide, such as
    experts.
    """
    guide = parse_guide(name)
    if guide is None:
        return [(name, [])]
    models = guide.kind.models(guide.folder, list(guide.settings))
    return [(model, list(names)) for model, names in models.items()] if guide.kind.strength is None else None


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
    out = Path(config.out)
    if resume and overwrite:
        raise OptionError("both --resume and --overwrite are given.", "give one of them.")
    require_own_folder(out, is_run, "a radq run")
    if is_run(out) and not (resume or overwrite):
        raise OptionError(
            f"{str(out)!r} holds a run already.", "continue it with --resume, or delete it with --overwrite."
        )
    for option, check in CHECKS.items():
        name = getattr(config, option, "")  # runs of experts have neither teachers nor `init`, `base` and `prompts`
        if name:
            check(name)
    teacher = getattr(config, "teacher", "")
    guides = [name for name in (split_teachers(teacher) if teacher else ()) if find_reward_models(name) is None]
    if guides and not getattr(config, "base", ""):  # whose candidates tell the range of their rewards
        raise OptionError(f"the teacher {teacher!r} is no reward model, and needs a base.", "give --base.")
    check_sources([*config.data, *config.eval_data], config.columns, config.optional_columns)
