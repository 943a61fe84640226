"""The run folder of a sweep: which folders are allowed, and a lock against a second process."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from radq.data.prompts import Prompt
from radq.errors import OptionError
from radq.evaluation.sweep.config import Sweep, dump_sweep, find_changes, fingerprint_prompts
from radq.files import require_own_folder, whole_file


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
            for name in ("config.yaml", "generations.jsonl", "costs.jsonl", "metrics.jsonl", "differences.jsonl"):
                (folder / name).unlink(missing_ok=True)
            for file in (folder / "measures").glob("*.npz"):
                file.unlink()
        if (folder / "config.yaml").exists():
            _require_same_sweep(folder, asked)
        else:
            with whole_file(folder / "config.yaml") as temporary:
                temporary.write_text(f"# prompts: {asked['prompts']}\n{dump_sweep(sweep)}", encoding="utf-8")
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
