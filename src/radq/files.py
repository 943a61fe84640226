"""Files and folders written completely or not at all, files of JSON lines, and fingerprints of contents."""

import errno
import hashlib
import json
import os
import secrets
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from radq.errors import DataError, OptionError, RadqError, WriteError, find_file_problem

if TYPE_CHECKING:  # commands use this module before they import torch
    from torch import Tensor

# Files that a saved model and its tokenizer may consist of: a second save into the same folder replaces all of them.
MODEL_FILES = (
    "config.json generation_config.json adapter_config.json calibration.json *.safetensors *.safetensors.index.json "
    "*tokenizer* special_tokens_map.json added_tokens.json vocab.* merges.txt chat_template.* "
    "additional_chat_templates"
).split()
RUN_FILES = ("config.yaml", "fingerprints.json")  # with which a training run begins: its settings and its contents


def default_cache_folder() -> Path:
    """Folder for tokenised data in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radq"


def require_own_folder(folder: str | Path, is_own: Callable[[Path], bool], what: str, overwrite: bool = True) -> None:
    """Refuse a folder with other files in it: it must be new, empty, or hold `what`, such as "a radq run", already.

    Without `overwrite`, it must be new.
    """
    folder = Path(folder)
    if folder.is_dir() and (is_own(folder) or not any(folder.iterdir())):
        if not overwrite:
            raise OptionError(f"{str(folder)!r} exists.", "choose another folder, or replace it with --overwrite.")
    elif folder.exists() or folder.is_symlink():
        kind = "folder that holds other files" if folder.is_dir() else "file"
        raise OptionError(f"{str(folder)!r} is a {kind}, not {what}.", "choose a new or empty folder.")


def require_room(folder: Path, needed: float, what: str, hint: str) -> None:
    """Refuse to begin if the disk of a folder, which need not be there yet, has less room than `what` needs."""
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise WriteError(
            f"{what} need {format_bytes(needed)} in {str(folder)!r}, and {format_bytes(free)} are free.", hint
        )


def format_bytes(number: float) -> str:
    """Write a number of bytes in words, such as "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


@contextmanager
def explained_writing(target: str | Path) -> Iterator[None]:
    """Turn errors of failed writes inside the block, also those of torch and safetensors, into one naming `target`."""
    try:
        yield
    except Exception as error:
        reason = None if isinstance(error, RadqError) else find_file_problem(error)
        if reason is None:
            raise
        raise WriteError(
            f"cannot write {str(target)!r}: {reason}.",
            "check that the disk has room and that you may write there; existing files are unchanged.",
        ) from error


@contextmanager
def atomic_folder(target: str | Path, replaces: Sequence[str] = (), proof: str | None = None) -> Iterator[Path]:
    """Make a temporary folder that becomes `target` when the block succeeds and is deleted when it fails.

    If `target` exists, the new files move into it one by one, and files go that `replaces` describes by patterns, since
    they belong to an earlier save. But where `target` holds a `proof` that it is finished, another process has made the
    same folder meanwhile and may be reading it: then it stays as it is.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with explained_writing(target):
            yield temporary
            _share(temporary)
            if not _rename_to_new(temporary, target) and not (proof and (target / proof).is_file()):
                _replace_files(temporary, target, replaces)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _share(folder: Path) -> None:
    """Give a folder and its files the permissions that the umask allows: mkdtemp and safetensors make private ones."""
    umask = os.umask(0)
    os.umask(umask)
    for path in (folder, *folder.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def _rename_to_new(source: Path, target: Path) -> bool:
    """Rename a folder unless `target` exists, also if another process makes it at this moment."""
    if target.exists():
        return False
    try:
        source.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _replace_files(source: Path, target: Path, replaces: Sequence[str]) -> None:
    """Move old files aside before new ones come in, so that a crash leaves a folder without files of both saves."""
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
def atomic_file(target: str | Path) -> Iterator[Path]:
    """Make a temporary file that becomes `target` when the block succeeds and is deleted when it fails."""
    target = Path(target)
    if target.exists() and not (target.is_file() or target.is_dir()):  # such as /dev/null, which would be gone
        raise OptionError(f"{str(target)!r} is a device or a pipe, and would be replaced.", "name a file.")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = name_temporary(target)
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def name_temporary(target: Path) -> Path:
    """A file beside `target` that no other process writes, be it on another machine or in another container."""
    return target.with_name(f".{target.name}-{os.getpid()}-{secrets.token_hex(4)}")


# --- JSON lines ---


def append_lines(stream: BinaryIO, rows: list[dict[str, Any]]) -> None:
    """Append rows to a jsonl file in one write, and wait until they are on the disk."""
    stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    stream.flush()
    os.fsync(stream.fileno())


def drop_partial_last_line(file: Path) -> None:
    """Remove a last line without an end, as a killed process leaves it, so that more lines can be appended."""
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
                    f"{file}, line {number} is not JSON: {shown}.", "remove the line, or make the file again."
                ) from error
            yield number, row


# --- fingerprints ---

FINGERPRINT_LENGTH = 24  # hexadecimal digits


def fingerprint_values(*values: object) -> str:
    """Fingerprint of values that JSON can hold; other values are first turned into text."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:FINGERPRINT_LENGTH]


def fingerprint_arrays(arrays: Iterable[np.ndarray]) -> str:
    """Fingerprint of the numbers, shapes and types of arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        values: Any = np.ascontiguousarray(array)
        digest.update(values.data.cast("B") if array.size else b"")
    return digest.hexdigest()[:FINGERPRINT_LENGTH]


def fingerprint_tensors(tensors: "Iterable[tuple[str, Tensor]]") -> str:
    """Fingerprint of named tensors on any device, in the order given: callers sort them by name."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        values: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(values.data)
    return digest.hexdigest()[:FINGERPRINT_LENGTH]


SMALL_FILE = 2**20  # bytes: such a file is read faster than its fingerprint is looked up
SETTLED = 2.0  # seconds after which a write changes the times of a file on every file system


def fingerprint_file(file: Path) -> str:
    """Fingerprint of all bytes of a file, which is read once as long as it stays as it is."""

    def read() -> str:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    return read() if file.stat().st_size < SMALL_FILE else remember("bytes", [file], read)


def remember(question: str, files: Sequence[Path], answer: Callable[[], str]) -> str:
    """The answer to a question about the contents of files, which is kept in the user's cache.

    It is found again as long as every file has the same place, size, times and inode. The answer about a file that was
    written a moment ago is not kept, since another write might leave its times as they are.
    """
    began, before = time.time_ns(), _describe_files(files)
    key = fingerprint_values(question, before)
    with suppress(sqlite3.Error, OSError), closing(_open_memory()) as memory:  # one that cannot be used is none
        row = memory.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        if row is not None:
            return str(row[0])
    found = answer()
    newest = max((max(times) for _, _, *times, _ in before), default=0)
    if began - newest > SETTLED * 1e9 and _describe_files(files) == before:
        with suppress(sqlite3.Error, OSError), closing(_open_memory()) as memory, memory:
            memory.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, found))
    return found


def _describe_files(files: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    stats = [(str(file.resolve()), file.stat()) for file in files]
    return [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats]


def _open_memory() -> sqlite3.Connection:
    folder = default_cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    memory = sqlite3.connect(folder / "fingerprints.sqlite", timeout=60)
    memory.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT) WITHOUT ROWID")
    return memory
