"""Where a model comes from: what its name stands for, found once and handed to everything that loads or compares it.

    source = ModelSource.find("gpt2")        # or a folder, `embedded`, `embedded:sentiment`, an adapter of PEFT
    source.config, source.tokenizer          # each answer is found when it is first asked for, and kept
    source.fingerprint                       # tells models apart by every tensor and file that answers depend on

Importing this module imports no torch, so that commands refuse a wrong name at once. Loading makes the same checks, so
commands make them first and Python may leave them to the loading.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from safetensors import safe_open

from radq.errors import ModelError, UnknownAttributeError
from radq.files import RUN_FILES, fingerprint_file, fingerprint_tensors, fingerprint_values, remember
from radq.settings import names_in_table
from radq.sources import MODEL_TYPE
from radq.sources.embedded import (
    CONVERTED,
    EMBEDDED,
    base_folder,
    base_name,
    find_embedded,
    is_as_converted,
    reward_folder,
)
from radq.sources.hub import HINT, HUB_OPTIONS, explained, find_file, require_source
from radq.sources.peft_adapter import PeftAdapter, find_adapter, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REWARD_KINDS = names_in_table("radq.models.reward:KINDS")
DIGITS = 16  # hexadecimal, of fingerprints
TEMPLATES = "additional_chat_templates"  # the only subfolder of a model that is part of it
RECORDS = (  # files beside a model that say something about it, data, and weights in formats that radq does not read
    *("calibration.json", "results.json", "labels.json", "fingerprints.json", "trainer_state.json"),
    *("*.csv", "*.gz", "*.html", "*.jsonl", "*.log", "*.md", "*.parquet", "*.png", "*.svg", "*.tsv", "*.yaml", "*.yml"),
    *("pytorch_model*", "tf_model*", "training_args.bin", "*.h5", "*.msgpack", "*.ot", "*.pt", "*.pth"),
    *("LICENSE*", ".*"),
)


@final
@dataclass(frozen=True, eq=False)
class ModelSource:
    """The model that a name stands for.

    The name is `embedded`, `embedded:ATTRIBUTE` for a reward model that radq brings along, a folder, or a hub name. The
    folder of an adapter of PEFT stands for its base model with the adapter merged into the weights. Answers are kept,
    also where a folder changes meanwhile: so a source lives as long as one call of a public function.
    """

    name: str
    hub: Mapping[str, Any] = field(default_factory=dict)  # options with which a hub name is loaded

    @classmethod
    def find(cls, name: "ModelName", **loading: Any) -> "ModelSource":
        """The source of a name; a source is returned as it is, unless other `HUB_OPTIONS` are given."""
        hub = {option: loading[option] for option in HUB_OPTIONS if option in loading}
        if isinstance(name, ModelSource) and hub in ({}, name.hub):
            return name
        return cls(str(name), hub)

    def __str__(self) -> str:
        return self.name

    # --- the place ---

    @property
    def is_base(self) -> bool:
        """Whether it is the language model that pip installs."""
        return self.name == EMBEDDED

    @property
    def attribute(self) -> str | None:
        """The attribute of a reward model that radq brings along; empty for its base model, None for other models."""
        kind, _, attribute = self.name.partition(":")
        return attribute if kind == EMBEDDED else None

    @cached_property
    def folder(self) -> Path | None:
        """The folder of the model; None for a hub name. The embedded base is converted when it is first asked for."""
        if self.attribute is not None:
            return reward_folder(self.attribute) if self.attribute else base_folder()
        return Path(self.name) if Path(self.name).is_dir() else None

    @cached_property
    def place(self) -> str:
        """The folder or hub name that transformers loads; refused if there is nothing of this name."""
        if self.attribute is not None:
            return str(self.folder)
        require_source(self.name, self.hub.get("cache_dir"))
        return self.name

    @property
    def full_name(self) -> str:
        """The name, which for a folder does not depend on the working directory."""
        return self.name if self.is_base or self.folder is None else str(self.folder.resolve())

    @cached_property
    def snapshot(self) -> Path:
        """The folder in which the files lie; for a hub name, that in the cache, which is called like the commit."""
        if self.folder is not None:
            return self.folder
        from transformers.utils.hub import cached_file

        with self.explained("a model configuration"):
            file = cached_file(self.name, "config.json", **self.hub)
        assert file is not None  # or it had raised
        return Path(file).parent

    def find_file(self, name: str, fetch: bool = True) -> Path:
        """The place of a file beside the model; one of the hub is fetched unless the cache holds it."""
        folder = self.folder if self.attribute is None else reward_folder(self.attribute)
        return folder / name if folder is not None else find_file(self.place if fetch else self.name, name, fetch)

    def explained(self, what: str) -> AbstractContextManager[None]:
        """Turn what transformers raises while it loads the model into one line that names it and a way out."""
        return explained(self.place, what)

    # --- what lies there ---

    @cached_property
    def adapter(self) -> PeftAdapter | None:
        """The adapter of PEFT that lies in the folder."""
        return find_adapter(self.name) if self.attribute is None else None

    @cached_property
    def base(self) -> "ModelSource | None":
        """The base model of the adapter."""
        return None if self.adapter is None else ModelSource(self.adapter.base, self.hub)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The contents of config.json. An adapter has those of its base model, with its own number of labels."""
        if self.adapter is not None and self.base is not None:
            check_language_model(self.base)
            stored = {} if self.base.is_base else self.base.config
            count = self.adapter.num_labels
            if count in (None, len(stored.get("id2label") or {})):
                return stored
            return {key: value for key, value in stored.items() if key != "id2label"} | {"num_labels": count}
        try:
            return read_object(self.find_file("config.json"), f"the config.json in {self.name!r}")
        except FileNotFoundError as error:
            raise self._lacks("config.json") from error

    @cached_property
    def _tokenizer_source(self) -> "ModelSource":
        """This source, or the base model of an adapter that has no tokenizer of its own."""
        if self.base is None or (Path(self.name) / "tokenizer_config.json").is_file():
            return self
        return self.base._tokenizer_source

    def find_tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The tokenizer beside the model; None where the folder has none."""
        folder = self._tokenizer_source.folder
        there = folder is None or any(file for name in ("*tokenizer*", "vocab.*") for file in folder.glob(name))
        return self.tokenizer if there else None

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer beside the model; the name may be that of a tokenizer.json."""
        if self._tokenizer_source is not self:
            return self._tokenizer_source.tokenizer
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        path = self.folder or Path(self.name)
        try:
            if path.suffix == ".json" and path.is_file():
                return PreTrainedTokenizerFast(tokenizer_file=str(path))
            if (path / "encoder.json").is_file() and (path / "vocab.bpe").is_file():
                return _read_gpt2_tokenizer(path)
        except Exception as error:  # tokenizers raises nothing more precise
            raise ModelError(f"cannot read a tokenizer from {str(path)!r}: {error}.", "is the file whole?") from error
        with self.explained("a tokenizer"):
            return AutoTokenizer.from_pretrained(self.place, **self.hub)

    def require_weights(self) -> None:
        """Refuse a folder without weights."""
        if not self.is_base and self.folder is not None and not any(self.folder.glob("*.safetensors")):
            raise self._lacks("*.safetensors")

    def _lacks(self, missing: str) -> ModelError:
        """The error about a folder that lacks a file of every model."""
        if all((Path(self.name) / file).is_file() for file in RUN_FILES):
            hint = "finish it: the same command with --resume."
            return ModelError(f"{self.name!r} holds an unfinished run, and no model yet.", hint)
        return ModelError(f"{self.name!r} holds no model: it has no {missing}.", HINT)

    # --- fingerprints ---

    @cached_property
    def fingerprint(self) -> str:
        """Tells models apart by their content: base models, reward models, classifiers and encoders.

        An adapter of PEFT is told by its base model, too, and a reward model beside a frozen backbone by that backbone.
        Files are read once, see `radq.files.remember`.
        """
        if self.is_base:
            return base_name()
        folder = self.folder
        if folder is None:
            return self.snapshot.name
        if is_as_converted(folder):
            return f"{EMBEDDED}@{folder.name.removeprefix(CONVERTED)}"  # as `base_name`: a loaded base knows its folder
        digest = hashlib.sha256()
        files = [file for file in (*folder.iterdir(), *(folder / TEMPLATES).glob("*")) if file.is_file()]
        for file in sorted(file for file in files if not any(fnmatch(file.name, pattern) for pattern in RECORDS)):
            digest.update(file.relative_to(folder).as_posix().encode() + bytes.fromhex(fingerprint_file(file)))
        own, below = digest.hexdigest()[:DIGITS], self.base or self._find_backbone(folder)
        return own if below is None else f"{own}+{below.fingerprint}"

    @property
    def identity(self) -> str:
        """The name and the fingerprint of a model, for people and for keys."""
        if self.is_base:
            return self.fingerprint
        shown = self.attribute or (self.name if self.folder is None else self.folder.resolve().name)
        return f"{shown}@{self.fingerprint}"

    @cached_property
    def weights_fingerprint(self) -> str:
        """The fingerprint of all tensors, which does not depend on how they are split into files.

        That of an adapter of PEFT is also about its settings, such as its scale, and about its base model.
        """
        if self.is_base:
            return base_name()  # files that were converted may differ between machines
        if self.adapter is not None and self.base is not None:
            settings = {key: value for key, value in self.adapter.settings.items() if key != "base_model_name_or_path"}
            own = _fingerprint_tensors([self.adapter.weights])
            return fingerprint_values(settings, own, self.base.weights_fingerprint)
        if not (files := find_weight_files(self.snapshot)):
            raise self._lacks("*.safetensors")
        return _fingerprint_tensors(files)

    @property
    def origin(self) -> "Origin":
        """The entries of config.json about a frozen backbone that is loaded from here."""
        is_hub = not self.is_base and self.folder is None
        return Origin(self.full_name, self.snapshot.name if is_hub else None, self.weights_fingerprint)

    def _find_backbone(self, folder: Path) -> "ModelSource | None":
        """The frozen backbone of the reward model in a folder; None if there is none, or not with the same weights."""
        with suppress(OSError, ValueError):  # also a ModelError: loading says why
            stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            if stored.get("model_type") == MODEL_TYPE and stored.get("backbone_name"):
                origin = Origin(*(stored.get(f"backbone_{name}") for name in ("name", "revision", "fingerprint")))
                source = origin.find(folder, "reward model")
                return source if source.is_base or source.folder is not None else None  # config.json names the commit
        return None


ModelName = str | Path | ModelSource


def _read_gpt2_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Byte-level BPE from the two files that GPT-2 was published with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend: Any = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end)


def fingerprint_weights_in(folder: Path) -> str | None:
    """Tell the weights in a folder apart by its safetensors files, which are the same on the hub; None without any."""
    files = sorted(folder.glob("*.safetensors"))
    return fingerprint_values(*((file.name, fingerprint_file(file)) for file in files)) if files else None


def _fingerprint_tensors(files: list[Path]) -> str:
    def tensors() -> Iterator[tuple[str, Any]]:
        places: dict[str, Path] = {}
        for file in files:
            with explained(file.parent, "model weights"), safe_open(file, "pt") as stored:
                places |= dict.fromkeys(stored.keys(), file)
        for name in sorted(places):
            with safe_open(places[name], "pt") as stored:
                yield name, stored.get_tensor(name)

    return remember("tensors", files, lambda: fingerprint_tensors(tensors()))


def find_weight_files(folder: Path, names: Sequence[str] = ("model.safetensors",)) -> list[Path]:
    """The weight files that transformers would load, of the first name that is there, whole or in parts."""
    for name in names:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            with explained(folder, "model weights"):
                parts = sorted({*json.loads(index.read_text())["weight_map"].values()})
            return [folder / Path(part).name for part in parts]
    return []


# --- the frozen backbone of a LoRA reward model or a readout ---


@dataclass(frozen=True)
class Origin:
    """The entries of config.json that say where a frozen backbone comes from.

    The path of a folder is stored relative to the folder of the reward model, so that both can move together and the
    working directory does not matter. The fingerprint tells whether the weights at that place are still the ones that
    adapters or readout were trained with.
    """

    name: str  # `embedded`, a hub name or a folder
    revision: str | None = None  # the commit of a hub name
    fingerprint: str | None = None  # of the weights; None in models that an earlier version has saved

    def relative_to(self, folder: Path) -> "Origin":
        """The origin as it is stored in the folder of the reward model: a path becomes relative to that folder."""
        if self.name == EMBEDDED or self.revision or not Path(self.name).is_absolute():
            return self
        return replace(self, name=Path(os.path.relpath(self.name, folder.resolve())).as_posix())

    def find(self, model_folder: Path | None, kind: str) -> ModelSource:
        """Find the backbone; refuse one with other weights. Errors call the reward model by its `kind`.

        The folder of the reward model is None if it comes from the hub.
        """
        folders = [folder for folder in self._candidate_folders(model_folder) if folder.is_dir()]
        places = [ModelSource.find(name) for name in ([EMBEDDED] if self.name == EMBEDDED else folders)]
        found = next((place for place in places if self.fingerprint in (None, place.weights_fingerprint)), None)
        if found is not None:
            return found
        if places:
            raise ModelError(
                f"{places[0].name!r} holds other weights than the backbone that this {kind} was trained with.",
                "restore that backbone, or pass backbone= with its folder to from_pretrained.",
            )
        if self.revision or (self.fingerprint is None and not self.name.startswith((".", "/", "~"))):
            return ModelSource(self.name, {"revision": self.revision} if self.revision else {})
        raise ModelError(
            f"the backbone {self.name!r} of this {kind} does not exist.",
            f"put it beside the {kind} as {Path(self.name).name!r}, or pass backbone= to from_pretrained.",
        )

    def _candidate_folders(self, model_folder: Path | None) -> list[Path]:
        """Its path relative to the model folder, its path as it is, and its name inside and beside the model folder."""
        if self.revision:
            return [Path(self.name)]  # transformers prefers a folder of this name to the hub
        path = Path(self.name).expanduser()
        if model_folder is None:
            return [path]
        return [model_folder / path, path, model_folder / path.name, model_folder.resolve().parent / path.name]


# --- checks ---


def check_language_model(name: ModelName) -> None:
    """Refuse a name under which no language model can be loaded."""
    source = ModelSource.find(name)
    if source.is_base:
        find_embedded()
        return
    require_language_model(source, source.config.get("model_type"))
    source.require_weights()


def check_reward_model(name: ModelName, attributes: Iterable[str] = ()) -> None:
    """Refuse a name under which no reward model with these attributes can be loaded."""
    source = ModelSource.find(name)
    require_reward_model(source, source.config)
    source.require_weights()
    require_attributes(attributes, source.config.get("attributes") or [])


def require_language_model(name: ModelName, model_type: Any) -> None:
    if model_type == MODEL_TYPE:
        raise ModelError(
            f"{str(name)!r} holds a reward model, not a language model.", "name the backbone that it was trained from."
        )


def require_reward_model(name: ModelName, stored: Mapping[str, Any]) -> None:
    if stored.get("model_type") != MODEL_TYPE or stored.get("kind") not in REWARD_KINDS:
        raise ModelError(
            f"{str(name)!r} holds a model of type {stored.get('model_type')!r}, not a reward model.",
            "train one with `radq train`, or convert a public checkpoint with `radq convert`.",
        )


def require_attributes(wanted: Iterable[str], known: Sequence[str]) -> None:
    for name in wanted:
        if name not in known:
            raise UnknownAttributeError(f"the reward model has no attribute {name!r}.", f"it has {', '.join(known)}.")


def holds_reward_model(folder: Path) -> bool:
    """Whether a folder holds a reward model, which a conversion may replace."""
    try:
        require_reward_model(folder, ModelSource.find(folder).config)
    except OSError:  # or a ModelError, which is one
        return False
    return True
