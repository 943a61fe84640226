"""The run folder of a sweep: which folders are allowed, what its files hold, and a lock for one process.

config.yaml holds the sweep, and fingerprints.json those of all models that write or measure texts. measures/CELL.npz
holds the numbers of each text of a cell: scores[judge], nll and tokens, and drawn_nll where decoding has noted it; each
is an array (p, n). The cost of a cell is its time, the calls and tokens of the guide's experts, and memory.
"""

import fcntl
import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import yaml

from radq.data.prompts import Prompt
from radq.errors import DataError, OptionError
from radq.evaluation.sweep.config import Sweep, find_changes, fingerprint_prompts
from radq.files import atomic_file, read_lines, require_own_folder
from radq.sources.model_source import ModelSource

FINGERPRINTS = "fingerprints.json"
FILES = ("config.yaml", "generations.jsonl", "costs.jsonl", "metrics.jsonl", "differences.jsonl", FINGERPRINTS)


@contextmanager
def open_sweep(folder: Path, sweep: Sweep, prompts: list[Prompt], overwrite: bool = False) -> Iterator[None]:
    """Prepare the run folder of a sweep and lock it for this process; refuse a folder that holds anything else."""
    require_own_folder(folder, _holds_sweep, "a sweep")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OptionError(
                f"another sweep is running in {str(folder)!r}.", "wait for its end, or use another --out."
            ) from error
        asked = {"sweep": asdict(sweep), "prompts": fingerprint_prompts(prompts)}
        if overwrite:
            for name in FILES:
                (folder / name).unlink(missing_ok=True)
            for file in (folder / "measures").glob("*.npz"):
                file.unlink()
        if (folder / "config.yaml").exists():
            _require_same_sweep(folder, asked)
        else:
            with atomic_file(folder / "config.yaml") as temporary:
                settings = yaml.safe_dump(asked["sweep"], sort_keys=False, allow_unicode=True)
                temporary.write_text(f"# prompts: {asked['prompts']}\n{settings}", encoding="utf-8")
        yield


def _holds_sweep(folder: Path) -> bool:
    """Whether `radq eval` has begun here. Other run folders have a config.yaml too, but no line about prompts in it."""
    if all(file.name.startswith(".") for file in folder.iterdir()):  # a sweep that ended before it wrote anything
        return True
    try:
        with (folder / "config.yaml").open(encoding="utf-8") as stream:
            return stream.readline().startswith("# prompts: ")
    except (OSError, UnicodeDecodeError):
        return False


def _require_same_sweep(folder: Path, asked: dict[str, Any]) -> None:
    """Refuse a folder that holds another sweep, and say what differs."""
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    first, _, _ = text.partition("\n")
    changes = list(find_changes(yaml.safe_load(text), json.loads(json.dumps(asked["sweep"]))))
    if not changes and first != f"# prompts: {asked['prompts']}":
        changes = ["the prompts in the files"]
    if changes:
        raise OptionError(
            f"{str(folder)!r} holds another sweep; changed since: {'; '.join(changes)}.",
            "use another --out, or delete the old sweep with --overwrite.",
        )


# --- models ---


def require_same_writers(folder: Path, sweep: Sweep) -> None:
    """Refuse to go on with the texts of a folder if the base model or a guide has changed."""
    writers = {"the base model": ModelSource.find(sweep.base).fingerprint}
    for name, guide in sweep.guides.items():
        if guide.folder:
            writers[f"the guide {name!r}"] = guide.at(1.0).fingerprint
    require_same_models(folder, writers, "generations.jsonl")


def require_same_models(folder: Path, fingerprints: dict[str, str], work: str = "measures/*.npz") -> None:
    """Refuse to go on with the `work` of models that have changed; the folder gets fingerprints that it lacks."""
    file, has_begun = folder / FINGERPRINTS, any(done.stat().st_size for done in folder.glob(work))
    known: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if has_begun and not fingerprints.keys() <= known.keys():
        warnings.warn(
            f"{str(folder)!r} was begun by an older radq, which kept no fingerprints: whether its models have changed "
            "since is not known. hint: --overwrite begins anew.",
            stacklevel=2,
        )
    changed = [name for name, own in fingerprints.items() if has_begun and known.get(name, own) != own]
    if changed:
        raise OptionError(
            f"{str(folder)!r} holds work of other models; changed since: {', '.join(changed)}.",
            "use another --out, or begin anew with --overwrite.",
        )
    with atomic_file(file) as temporary:
        temporary.write_text(json.dumps(known | fingerprints, indent=1, ensure_ascii=False), encoding="utf-8")


def array_file(folder: Path, cell: str) -> Path:
    return folder / "measures" / f"{cell}.npz"


def write_arrays(folder: Path, cell: str, arrays: dict[str, np.ndarray]) -> None:
    with atomic_file(array_file(folder, cell)) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **arrays)  # pyright: ignore[reportArgumentType]


def read_arrays(folder: Path, cell: str) -> dict[str, np.ndarray]:
    """Read the numbers of a cell. Files come from strangers too: no pickles, and nothing outside of the run folder."""
    file = array_file(folder, cell)
    try:
        if file.resolve().parent != (folder / "measures").resolve():
            raise ValueError("it is not in the run folder")
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise DataError(
            f"{str(file)!r} cannot be read: {error}.", "delete it, and run the same radq eval again."
        ) from error


# --- costs ---

EXPERT_COUNTS = ("steps", "calls", "expert_tokens")
SUMMED = ("seconds", "tokens", *EXPERT_COUNTS)


def read_costs(folder: Path) -> dict[str, dict[str, float]]:
    """Read costs.jsonl into tokens per second, calls and tokens of experts per token, and peak memory of each cell.

    Calls and tokens of experts that nobody counted are left out. Chunks that were generated again after a kill count
    twice.
    """
    sums: dict[str, dict[str, float]] = {}
    file = folder / "costs.jsonl"
    for row in read_lines(file) if file.exists() else ():
        cell = sums.setdefault(row["cell"], dict.fromkeys((*SUMMED, "peak_memory"), 0))
        for name in SUMMED:
            cell[name] += math.nan if row[name] is None else row[name]  # a sum with an unknown part is unknown
        cell["peak_memory"] = max(cell["peak_memory"], row["peak_memory"])
    costs = {}
    for name, cell in sums.items():
        rates = {
            "tokens_per_second": cell["tokens"] / cell["seconds"],
            "calls_per_token": cell["calls"] / cell["steps"] if cell["steps"] else math.nan,
            "expert_tokens_per_token": cell["expert_tokens"] / cell["tokens"],
            "peak_memory": cell["peak_memory"],
        }
        costs[name] = {rate: number for rate, number in rates.items() if not math.isnan(number)}
    return costs
