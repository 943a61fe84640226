"""Checkpoints of a run: finding them, writing their checksums, and checking them before a run goes on from one."""

import json
import warnings
import zlib
from pathlib import Path
from typing import Any

from radq.errors import ModelError

CHECKSUMS = "checksums.json"
STATE = "trainer_state.json"
BYTES_PER_READ = 2**24


def find_checkpoints(run: str | Path) -> list[Path]:
    """Find the checkpoints of a run, oldest first."""
    found = [path for path in Path(run).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of all files of a checkpoint, with which `find_damage` compares them later."""
    sums = {file.relative_to(checkpoint).as_posix(): _checksum(file) for file in _files(checkpoint)}
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
    best = _best_of(checkpoint, state)
    if best is not None and best != checkpoint and (damage := find_damage(best)):
        return f"its best checkpoint so far, {best.name}, is damaged: {damage}"
    return None


def find_newest_undamaged(run: str | Path) -> Path | None:
    """The newest checkpoint without damage; None if there are no checkpoints. Damaged ones are named in a warning."""
    damaged: list[str] = []
    for checkpoint in reversed(find_checkpoints(run)):
        damage = find_damage(checkpoint)
        if damage is None:
            if damaged:
                warnings.warn(f"{'; '.join(damaged)}. The run goes on from {checkpoint.name}.", stacklevel=2)
            return checkpoint
        damaged.append(f"{checkpoint} is damaged ({damage})")
    if damaged:
        raise ModelError(f"{'; '.join(damaged)}.", "no checkpoint is left to go on from; start again with --overwrite.")
    return None


def _best_of(checkpoint: Path, state: dict[str, Any]) -> Path | None:
    step = state.get("best_global_step")
    return checkpoint.parent / f"checkpoint-{step}" if step else None


def _files(checkpoint: Path) -> list[Path]:
    return sorted(file for file in checkpoint.rglob("*") if file.is_file())


def _checksum(file: Path) -> int:
    total = 0
    with file.open("rb") as stream:
        while piece := stream.read(BYTES_PER_READ):
            total = zlib.crc32(piece, total)
    return total
