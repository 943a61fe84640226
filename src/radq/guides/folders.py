"""How guides lie in folders. Importing this module imports no torch, so that commands can look into folders first."""

from pathlib import Path
from typing import TypedDict

from radq.sources.model_source import ModelName, ModelSource

EXPERT, ANTI_EXPERT = "expert", "anti"  # folders that `radq train-experts --method dexperts` writes


class ControlCodes(TypedDict):
    """The control codes of GeDi's two classes and its scale, as config.json holds them."""

    codes: list[list[int]]
    scale: float


def holds_experts(folder: str | Path) -> bool:
    """Whether a folder holds the two language models of DExperts."""
    return all((Path(folder) / name).is_dir() for name in (EXPERT, ANTI_EXPERT))


def read_codes(folder: ModelName) -> ControlCodes | None:
    """Read GeDi's control codes and scale from config.json; return None if the folder holds another model."""
    return ModelSource.find(folder).config.get("gedi")
