"""How guides lie in folders. Importing this module imports no torch, so that commands can look into folders first."""

from pathlib import Path
from typing import Any

from radq.models.stored import read_config

EXPERT, ANTI_EXPERT = "expert", "anti"  # folders that `radq train-experts --method dexperts` writes


def holds_experts(folder: str | Path) -> bool:
    """Whether a folder holds the two language models of DExperts."""
    return all((Path(folder) / name).is_dir() for name in (EXPERT, ANTI_EXPERT))


def read_codes(folder: str | Path) -> dict[str, Any] | None:
    """Read GeDi's control codes and scale from config.json; return None if the folder holds another model."""
    return read_config(folder).get("gedi")
