"""The folder of a training run: what it may hold before, what is written first, and what may change when it is resumed.

config.yaml has the settings, fingerprints.json the contents that the run depends on: data, evaluation data, teacher and
frozen weights.
"""

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from radq.errors import OptionError
from radq.files import MODEL_FILES, explained_writing, require_own_folder, whole_file
from radq.guides.dexperts import ANTI_EXPERT, EXPERT
from radq.training.checkpoints import find_checkpoints, newest_whole_checkpoint
from radq.training.config import TrainingConfig, load_settings

SETTINGS = "config.yaml"
FINGERPRINTS = "fingerprints.json"
MARKS = {"data", "labels", "out", "backbone", "batch_size", "learning_rate", "save_steps"}  # settings of every run
FOLLOWED = ("data", "eval_data", "teacher", "backbone")  # may have another name if their contents are the same
HARMLESS = ("out", "cache", "log_steps", "save_steps", "report_to", "micro_batch_size", "gradient_checkpointing")


def is_run(folder: Path) -> bool:
    """Whether a training of radq has begun there."""
    try:
        stored = yaml.safe_load((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    return isinstance(stored, dict) and stored.keys() >= MARKS


def open_run(out: Path, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that holds something else, and to write over a run by accident."""
    if resume and overwrite:
        raise OptionError("both --resume and --overwrite are given.", "go on with the run, or start it anew.")
    require_own_folder(out, is_run, "a radq run")
    if is_run(out) and not (resume or overwrite):
        raise OptionError(f"{str(out)!r} holds a run already.", "go on with --resume, or start anew with --overwrite.")


def find_resumed_checkpoint(out: Path, resume: bool) -> Path | None:
    """The checkpoint that a run goes on from."""
    return newest_whole_checkpoint(out) if resume else None


def begin_run(out: Path, config: TrainingConfig, contents: dict[str, str], resume: bool) -> None:
    """Write down what the run is; what an earlier one has left goes, unless it is resumed."""
    with explained_writing(out):
        out.mkdir(parents=True, exist_ok=True)
        if not resume:
            forget_run(out)
        with whole_file(out / SETTINGS) as file:
            file.write_text(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
        with whole_file(out / FINGERPRINTS) as file:
            file.write_text(json.dumps(contents))


def forget_run(out: Path) -> None:
    """Remove what an earlier run has left: checkpoints, metrics, targets, and the models it has made."""
    for folder in (*find_checkpoints(out), out / "targets", out / EXPERT, out / ANTI_EXPERT):
        shutil.rmtree(folder, ignore_errors=True)
    for path in (path for pattern in ("metrics.jsonl", "results.json", *MODEL_FILES) for path in out.glob(pattern)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def check_resumed(out: Path, config: TrainingConfig, contents: dict[str, str]) -> None:
    """Refuse to go on with a run on other data or with other settings, and say what has changed."""
    if not is_run(out):
        return
    try:
        begun = load_settings(out / SETTINGS, type(config))
    except OptionError as error:
        raise OptionError(
            f"the run in {str(out)!r} is not of this command: {error.message}",
            "resume it by the command that began it.",
        ) from error
    known = _read_contents(out)
    changed = [
        f"{option.name} from {getattr(begun, option.name)!r} to {getattr(config, option.name)!r}"
        for option in fields(config)
        if option.name not in HARMLESS
        and not (option.name in FOLLOWED and option.name in known)
        and getattr(begun, option.name) != getattr(config, option.name)
    ]
    if known:
        changed += [f"the contents of {name}" for name in FOLLOWED if known.get(name) != contents.get(name)]
    if changed:
        raise OptionError(
            f"the run in {str(out)!r} cannot go on: {'; '.join(changed)} changed.",
            f"give what it was begun with, or start anew with --overwrite; {', '.join(HARMLESS)} may change.",
        )


def _read_contents(out: Path) -> dict[str, Any]:
    """The fingerprints; none of a run that an older radq began."""
    try:
        return dict(json.loads((out / FINGERPRINTS).read_text()))
    except (OSError, ValueError, TypeError):
        return {}
