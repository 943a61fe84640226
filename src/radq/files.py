"""Files and folders that are written as a whole or not at all, files of JSON lines, and fingerprints of contents."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from radq.errors import DataError, OptionError, RadqError, WriteError

# What a saved model and its tokenizer may consist of: a second save into the same folder replaces all of it.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_config.json",
    "*tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates",
)


def default_cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radq"


def require_own_folder(folder: str | Path, is_own: Callable[[Path], bool], what: str) -> None:
    """Refuse to write into a folder that holds something else: it must be new, empty, or hold `what` already.

    `is_own` says whether a folder holds `what`, which a message names: "a radq run".
    """
    folder = Path(folder)
    if folder.is_dir() and (is_own(folder) or not any(folder.iterdir())):
        return
    if folder.exists() or folder.is_symlink():
        kind = "folder that holds other files" if folder.is_dir() else "file"
        raise OptionError(f"{str(folder)!r} is a {kind}, not {what}.", "choose a new or empty folder.")


@contextmanager
def explained_writing(target: str | Path) -> Iterator[None]:
    """Turn what torch and safetensors raise where a disk is full into one error that names the place."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, RuntimeError) as error:
        if isinstance(error, RadqError) or (isinstance(error, RuntimeError) and "inline_container" not in str(error)):
            raise
        reason = str(error).strip().splitlines()[0].rstrip(".")
        if isinstance(error, RuntimeError):  # torch says nothing but at which byte it stopped
            reason = "a file could be written in part only"
        raise WriteError(
            f"cannot write {str(target)!r}: {reason}.", "is the disk full? what was there before is unchanged."
        ) from error


@contextmanager
def whole_folder(target: str | Path, replaces: Sequence[str] = ()) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place when the block succeeds and vanishes when it fails.

    Into a folder that exists already, the finished files move one by one. What was there under the same names goes, and
    so does all else that matches one of the patterns `replaces`: files of an earlier save that this one has not made.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with explained_writing(target):
            yield temporary
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o777 & ~umask)  # mkdtemp makes private folders
            if target.exists():
                _replace_files(temporary, target, replaces)
            else:
                temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _replace_files(source: Path, target: Path, replaces: Sequence[str]) -> None:
    """Old files first move aside, so that a crash in between leaves a folder that lacks files, not one that mixes."""
    new = [path.name for path in source.iterdir()]
    stale = {path.name for pattern in replaces for path in target.glob(pattern)} | {*new}
    aside = source / ".replaced"
    aside.mkdir()
    for name in stale:
        if (target / name).exists():
            (target / name).rename(aside / name)
    for name in new:
        (source / name).rename(target / name)


@contextmanager
def whole_file(target: str | Path) -> Iterator[Path]:
    """A temporary file beside `target` that takes its place when the block succeeds and vanishes when it fails."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def append_lines(stream: BinaryIO, rows: list[dict[str, Any]]) -> None:
    """Append rows to a jsonl file in one write, and wait until they are on the disk."""
    stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    stream.flush()
    os.fsync(stream.fileno())


def drop_partial_last_line(file: Path) -> None:
    """Cut off a last line without its end, as a killed process leaves it, so that more lines can be appended."""
    if file.exists():
        data = file.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(file, data.rfind(b"\n") + 1)


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of a jsonl file; a partial last line, as a killed process leaves it, is left out."""
    return (row for _, row in read_numbered_lines(file))


def read_numbered_lines(file: Path, notes: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the rows of a jsonl file with the numbers of their lines; blank lines are skipped.

    A partial last line is left out, and `notes` then gets a sentence about it.
    """
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    if notes is not None:
                        notes.append(f"{file}, line {number}: the last line is cut off, and left out.")
                    return
                shown = repr(line.decode(errors="replace").strip())
                shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
                raise DataError(
                    f"{file}, line {number} is damaged: {shown}.", "remove the line, or make the file again."
                ) from error
            yield number, row


LENGTH = 24  # hexadecimal digits


def fingerprint(*values: object) -> str:
    """The fingerprint of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:LENGTH]


def fingerprint_arrays(arrays: Iterable[np.ndarray]) -> str:
    """The fingerprint of arrays: their numbers, shapes and types."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        values: Any = np.ascontiguousarray(array)
        digest.update(values.data.cast("B") if array.size else b"")
    return digest.hexdigest()[:LENGTH]


def fingerprint_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The fingerprint of named tensors, on any device; the caller sorts them by name."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        values: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(values.data)
    return digest.hexdigest()[:LENGTH]
