"""Stored models, checked by their config.json alone: a mistake shows before torch is imported and weights are read.

Loading makes the same checks, so commands make them first and Python may leave them to the loading.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from radq.errors import ModelError, UnknownAttributeError
from radq.files import RUN_FILES
from radq.models import MODEL_TYPE
from radq.models.embedded import EMBEDDED, find_embedded, reward_folder
from radq.models.hub import HINT, find_file
from radq.models.peft_adapter import find_adapter
from radq.settings import names_in_table

REWARD_KINDS = names_in_table("radq.models.reward:KINDS")


def check_language_model(name: str | Path) -> None:
    """Refuse a name under which no language model can be loaded."""
    if str(name) == EMBEDDED:
        find_embedded()
        return
    require_language_model(name, read_config(name).get("model_type"))
    require_weights(name)


def check_reward_model(name: str | Path, attributes: Iterable[str] = ()) -> None:
    """Refuse a name under which no reward model with these attributes can be loaded."""
    stored = read_config(name)
    require_reward_model(name, stored)
    require_weights(name)
    require_attributes(attributes, stored.get("attributes") or [])


def read_config(name: str | Path) -> dict[str, Any]:
    """Read the config.json of a model by folder, hub name or `embedded:ATTRIBUTE`.

    An adapter of PEFT has that of its base model, with its own number of labels.
    """
    if (adapter := find_adapter(name)) is not None:
        check_language_model(adapter.base)
        stored = {} if adapter.base == EMBEDDED else read_config(adapter.base)
        count = adapter.num_labels
        if count in (None, len(stored.get("id2label") or {})):
            return stored
        return {key: value for key, value in stored.items() if key != "id2label"} | {"num_labels": count}
    kind, _, attribute = str(name).partition(":")
    file = find_file(reward_folder(attribute) if kind == EMBEDDED else name, "config.json")
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _no_model(name, "config.json") from error
    except ValueError as error:
        raise ModelError(f"the config.json in {str(name)!r} is damaged: {error}.", "copy it again.") from error
    if not isinstance(stored, dict):
        raise ModelError(f"the config.json in {str(name)!r} is damaged: it is {stored!r}.", "copy it again.")
    return stored


def require_weights(name: str | Path) -> None:
    """Refuse a folder without weights."""
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        raise _no_model(name, "*.safetensors")


def _no_model(name: str | Path, missing: str) -> ModelError:
    """The error about a folder that lacks a file of every model."""
    if all((Path(name) / file).is_file() for file in RUN_FILES):
        return ModelError(
            f"{str(name)!r} holds an unfinished run, and no model yet.", "finish it: the same command with --resume."
        )
    return ModelError(f"{str(name)!r} holds no model: it has no {missing}.", HINT)


def require_language_model(name: str | Path, model_type: Any) -> None:
    if model_type == MODEL_TYPE:
        raise ModelError(
            f"{str(name)!r} holds a reward model, not a language model.", "name the backbone that it was trained from."
        )


def require_reward_model(name: str | Path, stored: Mapping[str, Any]) -> None:
    if not is_reward_model(stored):
        raise ModelError(
            f"{str(name)!r} holds a model of type {stored.get('model_type')!r}, not a reward model.",
            "train one with `radq train`, or convert a public checkpoint with `radq convert`.",
        )


def is_reward_model(stored: Mapping[str, Any]) -> bool:
    return stored.get("model_type") == MODEL_TYPE and stored.get("kind") in REWARD_KINDS


def require_attributes(wanted: Iterable[str], known: Sequence[str]) -> None:
    for name in wanted:
        if name not in known:
            raise UnknownAttributeError(f"the reward model has no attribute {name!r}.", f"it has {', '.join(known)}.")


def holds_reward_model(folder: Path) -> bool:
    """Whether a folder holds a reward model, which a conversion may replace."""
    try:
        return is_reward_model(read_config(folder))
    except (ModelError, OSError):
        return False
