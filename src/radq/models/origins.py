"""Where the frozen backbone of a LoRA reward model comes from, and whether what lies there is still that backbone.

A backbone is `embedded`, a hub name with its revision, or a folder. The path of a folder is stored relative to the
folder of the reward model, so that both can move together and the working directory does not matter.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from radq.errors import ModelError
from radq.files import fingerprint_tensors
from radq.models.embedded import EMBEDDED, base_name
from radq.models.loading import explained, find_snapshot


@dataclass(frozen=True)
class Origin:
    """The entries of config.json that say where the backbone comes from."""

    name: str  # `embedded`, a hub name or a folder
    revision: str | None = None  # the commit of a hub name
    fingerprint: str | None = None  # of the weights; None where an earlier version has stored the model

    @property
    def is_hub(self) -> bool:
        return self.revision is not None

    def relative_to(self, folder: Path) -> "Origin":
        """The origin as it is stored in the reward model's folder: a path is relative to that folder."""
        if self.name == EMBEDDED or self.is_hub or not Path(self.name).is_absolute():
            return self
        return replace(self, name=Path(os.path.relpath(self.name, folder.resolve())).as_posix())


def identify_backbone(name: str | Path) -> Origin:
    """Find out what to remember about a backbone that can be loaded here by this name."""
    if str(name) == EMBEDDED:
        return Origin(EMBEDDED, None, base_name())
    if Path(name).is_dir():
        return Origin(str(Path(name).resolve()), None, fingerprint_weights(Path(name)))
    snapshot = find_snapshot(str(name))
    return Origin(str(name), snapshot.name, fingerprint_weights(snapshot))


def find_backbone_source(origin: Origin, model_folder: Path | None) -> str:
    """The name or folder to load the backbone from; refuses one with other weights.

    Args:
        model_folder: the reward model's own folder; None where it comes from the hub.
    """
    if origin.name == EMBEDDED:
        _compare(origin, EMBEDDED, base_name())
        return EMBEDDED
    folders = [folder for folder in _candidate_folders(origin, model_folder) if folder.is_dir()]
    if origin.fingerprint is None and folders:
        return str(folders[0])
    matching = [folder for folder in folders if fingerprint_weights(folder) == origin.fingerprint]
    if matching:
        return str(matching[0])
    if folders:
        _compare(origin, str(folders[0]), fingerprint_weights(folders[0]))
    if origin.is_hub or (origin.fingerprint is None and not origin.name.startswith((".", "/", "~"))):
        return origin.name
    raise ModelError(
        f"the backbone {origin.name!r} of this LoRA reward model is not there.",
        f"put it as {Path(origin.name).name!r} beside the reward model, or pass backbone= to from_pretrained.",
    )


def _candidate_folders(origin: Origin, model_folder: Path | None) -> list[Path]:
    """Relative to the model folder, as it is, and, under its own name, in or beside the model folder."""
    if origin.is_hub:
        return [Path(origin.name)]  # which transformers would prefer to the hub
    path = Path(origin.name).expanduser()
    if model_folder is None:
        return [path]
    return [model_folder / path, path, model_folder / path.name, model_folder.resolve().parent / path.name]


def _compare(origin: Origin, found: str, fingerprint: str) -> None:
    if origin.fingerprint not in (None, fingerprint):
        raise ModelError(
            f"{found!r} holds other weights than the backbone that this LoRA reward model was trained beside.",
            "bring that backbone back, or pass backbone= to from_pretrained.",
        )


def fingerprint_weights(folder: Path) -> str:
    """The fingerprint of all tensors in a model folder; it does not depend on how they are spread over files."""
    places = {name: file for file in _weight_files(folder) for name in _names(file)}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in sorted(places):
            with safe_open(places[name], "pt") as stored:
                yield name, stored.get_tensor(name)

    return fingerprint_tensors(tensors())


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers would load."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    with explained(folder, "model weights"):
        return [folder / Path(name).name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _names(file: Path) -> list[str]:
    with explained(file.parent, "model weights"), safe_open(file, "pt") as stored:
        return list(stored.keys())
