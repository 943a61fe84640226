"""Adapters of PEFT: a folder with adapter_config.json and adapter_model.safetensors, and a base model elsewhere.

Wherever radq loads a model of transformers by name, such a folder stands for its base model with the adapter merged
into the weights. So the result is a plain model, as fast as the base model, and other weights have other fingerprints.
Only `merge_adapter` needs the package peft; the other functions read files without importing torch.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from radq.errors import ModelError, OptionError, first_line, require_package
from radq.sources import MODEL_TYPE
from radq.sources.embedded import EMBEDDED
from radq.sources.hub import quiet, require_source

CONFIG_FILE, WEIGHT_FILE = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class PeftAdapter:
    """A folder with an adapter, and the name or folder of its base model."""

    folder: Path
    base: str
    settings: dict[str, Any]

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHT_FILE

    @property
    def replaced(self) -> tuple[str, ...]:
        """The modules that the adapter holds whole, such as the head of a classifier."""
        return tuple(self.settings.get("modules_to_save") or ())

    @property
    def num_labels(self) -> int | None:
        """The number of outputs of a classifier, by the shape of its last layer; None of a language model."""
        if self.settings.get("task_type") != "SEQ_CLS":
            return None
        heads = [shape for name, shape in self.shapes().items() if {*name.split(".")} & {*self.replaced}]
        return min((shape[0] for shape in heads if len(shape) == 2), default=None)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the stored tensors by their names."""
        try:
            with safe_open(self.weights, "np") as stored:
                return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"{str(self.weights)!r} is damaged: {error}.", "copy or download it again.") from error


def find_adapter(name: str | Path) -> PeftAdapter | None:
    """The adapter in a folder; None if the name stands for anything else, such as a LoRA reward model of radq."""
    folder = Path(name)
    if not (folder / CONFIG_FILE).is_file():
        return None
    if (folder / "config.json").is_file():
        if read_object(folder / "config.json").get("model_type") == MODEL_TYPE:
            return None
        raise ModelError(
            f"{str(name)!r} holds a model and an adapter, and it is not clear whether the adapter is meant.",
            f"move {CONFIG_FILE} and {WEIGHT_FILE} into a folder of their own, or remove them.",
        )
    settings = read_object(folder / CONFIG_FILE)
    if not (folder / WEIGHT_FILE).is_file():
        raise ModelError(
            f"the adapter in {str(name)!r} has no {WEIGHT_FILE}.", "save it with safetensors; radq reads no pickles."
        )
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base or Path(base).resolve() == folder.resolve():
        raise ModelError(
            f"the adapter in {str(name)!r} names no base model, but {base!r}.",
            f"write the name or folder of its base model as base_model_name_or_path into {CONFIG_FILE}.",
        )
    if base != EMBEDDED:
        try:
            require_source(base)
        except ModelError as error:
            raise ModelError(
                f"the base model of the adapter in {str(name)!r} is not found: {error.message}",
                f"write its name or folder as base_model_name_or_path into {CONFIG_FILE}.",
            ) from error
    return PeftAdapter(folder, base, settings)


def read_object(file: Path, what: str | None = None) -> dict[str, Any]:
    """Read a JSON object from a file, which errors call `what`."""
    what = what or repr(str(file))
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{what} is damaged: {error}.", "copy it again.") from error
    if not isinstance(stored, dict):
        raise ModelError(f"{what} is damaged: it is {stored!r}.", "copy it again.")
    return stored


def merge_adapter(model: Any, adapter: PeftAdapter, whole: bool = True) -> Any:
    """Add an adapter to its base model. If that is `whole`, every tensor of the adapter must find its place."""
    peft = require_package("peft", "peft")
    name, stored = str(adapter.folder), adapter.shapes().keys()
    hint = f"is this its base model? {CONFIG_FILE} names it under base_model_name_or_path."
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tensors without a place, which are refused below
            adapted = peft.PeftModel.from_pretrained(model, name, torch_device=str(model.device))
        refuse_soft_prompts(adapted)
        used = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
        if others := sorted(used - stored) + (sorted(stored - used) if whole else []):
            raise ModelError(
                f"the adapter in {name!r} does not fit {adapter.base!r}: {len(others)} tensors are missing or have no "
                f"place there, the first is {others[0]!r}.",
                hint,
            )
        merged = adapted.merge_and_unload(safe_merge=True)
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ModelError | OptionError):
            raise
        raise ModelError(
            f"the adapter in {name!r} cannot be merged into {adapter.base!r}: {first_line(error).rstrip('.:')}.",
            hint,
        ) from error
    merged.name_or_path = merged.config.name_or_path = name
    return merged.eval()


def refuse_soft_prompts(model: Any) -> None:
    """Refuse a model inside PEFT that reads trained vectors before each text, which decoding would leave out."""
    adapters = getattr(model, "peft_config", None)
    for settings in adapters.values() if isinstance(adapters, dict) else ():
        if getattr(settings, "is_prompt_learning", False):
            kind = getattr(settings.peft_type, "value", settings.peft_type)
            raise ModelError(
                f"this language model has a trained prompt of PEFT ({kind}), which radq does not read.",
                "use an adapter that changes weights, such as LoRA.",
            )
