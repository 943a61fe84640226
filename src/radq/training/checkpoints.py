"""Checkpoints of a run: found, sealed with checksums, and checked before a run goes on from one."""

import json
import warnings
import zlib
from pathlib import Path
from typing import Any

from radq.errors import ModelError

SEAL = "checksums.json"
STATE = "trainer_state.json"
BYTES_PER_READ = 2**24


def find_checkpoints(run: str | Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    found = [path for path in Path(run).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def seal(checkpoint: Path) -> None:
    """Write down the checksums of all files, by which damage shows later."""
    sums = {file.relative_to(checkpoint).as_posix(): _checksum(file) for file in _files(checkpoint)}
    (checkpoint / SEAL).write_text(json.dumps(sums))


def find_damage(checkpoint: Path) -> str | None:
    """Say what is wrong with a checkpoint, or return None. An older radq wrote no checksums; it is trusted."""
    try:
        state = json.loads((checkpoint / STATE).read_text())
        sealed = json.loads((checkpoint / SEAL).read_text()) if (checkpoint / SEAL).exists() else {}
        wrong = [name for name, known in sealed.items() if _checksum(checkpoint / name) != known]
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    if wrong:
        return f"{wrong[0]} is not as it was written"
    best = _best_of(checkpoint, state)
    if best is not None and best != checkpoint and (damage := find_damage(best)):
        return f"of the best checkpoint so far, {best.name}: {damage}"
    return None


def newest_whole_checkpoint(run: str | Path) -> Path | None:
    """The one to go on from; a damaged one is passed over, which a warning says. None where none was written."""
    damaged: list[str] = []
    for checkpoint in reversed(find_checkpoints(run)):
        damage = find_damage(checkpoint)
        if damage is None:
            if damaged:
                warnings.warn(f"{'; '.join(damaged)}. The run goes on from {checkpoint.name}.", stacklevel=2)
            return checkpoint
        damaged.append(f"{checkpoint} is damaged ({damage})")
    if damaged:
        raise ModelError(f"{'; '.join(damaged)}.", "there is none before it; start anew with --overwrite.")
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
