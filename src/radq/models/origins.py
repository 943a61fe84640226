"""The origin of the frozen backbone of a LoRA reward model or a readout: its place, and a fingerprint of its weights.

A backbone is `embedded`, a hub name with its revision, or a folder. The path of a folder is stored relative to the
folder of the reward model, so that both can move together and the working directory does not matter. The fingerprint
tells whether the weights at that place are still the ones that the adapters were trained with.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from radq.errors import ModelError
from radq.files import fingerprint_tensors, fingerprint_values, remember
from radq.models.embedded import EMBEDDED, base_name
from radq.models.hub import explained, find_snapshot
from radq.models.peft_adapter import find_adapter


@dataclass(frozen=True)
class Origin:
    """The entries of config.json that say where the backbone comes from."""

    name: str  # `embedded`, a hub name or a folder
    revision: str | None = None  # the commit of a hub name
    fingerprint: str | None = None  # of the weights; None in models that an earlier version has saved

    @property
    def is_hub(self) -> bool:
        return self.revision is not None

    def relative_to(self, folder: Path) -> "Origin":
        """The origin as it is stored in the folder of the reward model: a path becomes relative to that folder."""
        if self.name == EMBEDDED or self.is_hub or not Path(self.name).is_absolute():
            return self
        return replace(self, name=Path(os.path.relpath(self.name, folder.resolve())).as_posix())


def identify_backbone(name: str | Path) -> Origin:
    """The origin of a backbone that is loaded by this name."""
    if str(name) == EMBEDDED:
        return Origin(EMBEDDED, None, base_name())
    if Path(name).is_dir():
        return Origin(str(Path(name).resolve()), None, fingerprint_weights(Path(name)))
    snapshot = find_snapshot(str(name))
    return Origin(str(name), snapshot.name, fingerprint_weights(snapshot))


def find_backbone_source(origin: Origin, model_folder: Path | None, kind: str) -> str:
    """Find the name or folder to load the backbone from; refuse a backbone with other weights.

    Args:
        model_folder: the folder of the reward model; None if it comes from the hub.
        kind: what errors call the reward model, such as "readout".
    """
    if origin.name == EMBEDDED:
        _refuse_other_weights(origin, EMBEDDED, base_name(), kind)
        return EMBEDDED
    folders = [folder for folder in _candidate_folders(origin, model_folder) if folder.is_dir()]
    if origin.fingerprint is None and folders:
        return str(folders[0])
    matching = [folder for folder in folders if fingerprint_weights(folder) == origin.fingerprint]
    if matching:
        return str(matching[0])
    if folders:
        _refuse_other_weights(origin, str(folders[0]), fingerprint_weights(folders[0]), kind)
    if origin.is_hub or (origin.fingerprint is None and not origin.name.startswith((".", "/", "~"))):
        return origin.name
    raise ModelError(
        f"the backbone {origin.name!r} of this {kind} does not exist.",
        f"put it beside the {kind} as {Path(origin.name).name!r}, or pass backbone= to from_pretrained.",
    )


def _candidate_folders(origin: Origin, model_folder: Path | None) -> list[Path]:
    """Folders that may hold the backbone, in the order in which they are tried.

    These are its path relative to the model folder, its path as it is, and its name inside and beside the model folder.
    """
    if origin.is_hub:
        return [Path(origin.name)]  # transformers prefers a folder of this name to the hub
    path = Path(origin.name).expanduser()
    if model_folder is None:
        return [path]
    return [model_folder / path, path, model_folder / path.name, model_folder.resolve().parent / path.name]


def _refuse_other_weights(origin: Origin, found: str, fingerprint: str, kind: str) -> None:
    if origin.fingerprint not in (None, fingerprint):
        raise ModelError(
            f"{found!r} holds other weights than the backbone that this {kind} was trained with.",
            "restore that backbone, or pass backbone= with its folder to from_pretrained.",
        )


def fingerprint_weights(folder: Path) -> str:
    """The fingerprint of all tensors in a model folder, which does not depend on how they are split into files.

    That of an adapter of PEFT is also about its settings, such as its scale, and about its base model.
    """
    if (adapter := find_adapter(folder)) is not None:
        settings = {key: value for key, value in adapter.settings.items() if key != "base_model_name_or_path"}
        base = identify_backbone(adapter.base).fingerprint
        return fingerprint_values(settings, _fingerprint_files([adapter.weights]), base)
    return _fingerprint_files(_weight_files(folder))


def _fingerprint_files(files: list[Path]) -> str:
    def tensors() -> Iterator[tuple[str, Tensor]]:
        places = {name: file for file in files for name in _tensor_names(file)}
        for name in sorted(places):
            with safe_open(places[name], "pt") as stored:
                yield name, stored.get_tensor(name)

    return remember("tensors", files, lambda: fingerprint_tensors(tensors()))


def _weight_files(folder: Path) -> list[Path]:
    """The weight files that transformers would load."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    with explained(folder, "model weights"):
        return [folder / Path(name).name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def _tensor_names(file: Path) -> list[str]:
    with explained(file.parent, "model weights"), safe_open(file, "pt") as stored:
        return list(stored.keys())
