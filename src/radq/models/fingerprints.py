"""Fingerprints of stored models: all that a cache or a run folder needs to know in order to tell models apart.

    fingerprint_model("gpt2")          # the commit of a hub name
    fingerprint_model("runs/praise")   # of all files of the folder that its answers depend on
    identify("runs/praise")            # the same with the name of the folder before it

Every tensor counts. Files are read once, see `radq.files.remember`. Importing this module imports no torch.
"""

import hashlib
import json
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from radq.files import fingerprint_file, fingerprint_values
from radq.models import MODEL_TYPE
from radq.models.embedded import CONVERTED, EMBEDDED, base_name, is_as_converted, reward_folder
from radq.models.hub import find_snapshot
from radq.models.peft_adapter import find_adapter

DIGITS = 16  # hexadecimal
TEMPLATES = "additional_chat_templates"  # the only subfolder of a model that is part of it
RECORDS = (  # files beside a model that say something about it, data, and weights in formats that radq does not read
    *("calibration.json", "results.json", "labels.json", "fingerprints.json", "trainer_state.json"),
    *("*.csv", "*.gz", "*.html", "*.jsonl", "*.log", "*.md", "*.parquet", "*.png", "*.svg", "*.tsv", "*.yaml", "*.yml"),
    *("pytorch_model*", "tf_model*", "training_args.bin", "*.h5", "*.msgpack", "*.ot", "*.pt", "*.pth"),
    *("LICENSE*", ".*"),
)


def fingerprint_model(name: str | Path) -> str:
    """Tell models apart by their content: a base model, a reward model, a classifier or an encoder.

    An adapter of PEFT is told by its base model, too, and a reward model beside a frozen backbone by that backbone.
    """
    if str(name) == EMBEDDED:
        return base_name()
    kind, _, attribute = str(name).partition(":")
    folder = reward_folder(attribute) if kind == EMBEDDED else Path(name)
    if not folder.is_dir():
        return find_snapshot(str(name)).name
    if is_as_converted(folder):
        return f"{EMBEDDED}@{folder.name.removeprefix(CONVERTED)}"  # as `base_name`: a loaded base knows its folder
    digest = hashlib.sha256()
    for file in _model_files(folder):
        digest.update(file.relative_to(folder).as_posix().encode() + bytes.fromhex(fingerprint_file(file)))
    own, below = digest.hexdigest()[:DIGITS], _find_below(folder)
    return own if below is None else f"{own}+{fingerprint_model(below)}"


def fingerprint_weights_in(folder: Path) -> str | None:
    """Tell the weights in a folder apart by its safetensors files, which are the same on the hub; None without any."""
    files = sorted(folder.glob("*.safetensors"))
    return fingerprint_values(*((file.name, fingerprint_file(file)) for file in files)) if files else None


def identify(name: str | Path) -> str:
    """Name a model by its content, for people and for keys."""
    fingerprint = fingerprint_model(name)
    if str(name) == EMBEDDED:
        return fingerprint
    kind, _, attribute = str(name).partition(":")
    shown = attribute if kind == EMBEDDED else Path(name).resolve().name if Path(name).is_dir() else name
    return f"{shown}@{fingerprint}"


def _find_below(folder: Path) -> str | None:
    """The model on which the one in a folder stands; None if there is none, or none with the weights that it needs."""
    if (adapter := find_adapter(folder)) is not None:
        return adapter.base
    with suppress(OSError, ValueError):  # also a ModelError: loading says why
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if stored.get("model_type") == MODEL_TYPE and stored.get("backbone_name"):
            from radq.models.config import RewardModelConfig
            from radq.models.origins import find_backbone_source

            source = find_backbone_source(RewardModelConfig.from_dict(stored).origin, folder, "reward model")
            return source if source == EMBEDDED or Path(source).is_dir() else None  # config.json names the commit
    return None


def _model_files(folder: Path) -> list[Path]:
    files = [*folder.iterdir(), *(folder / TEMPLATES).glob("*")]
    return sorted(file for file in files if file.is_file() and not any(fnmatch(file.name, one) for one in RECORDS))
