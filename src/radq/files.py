"""Writing to users' disks: whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from radq.errors import OptionError, RadqError, WriteError

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
