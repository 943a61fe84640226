"""Errors that a user can act on. Each has a message, which says what was wrong, and a hint, which says what to do.

Every class is also the type of the standard library that a caller would expect. The command line prints such an error
as one line, `error: … hint: …`, and exits with code 2. `explain` gives such a line also for errors of other libraries
whose cause is the machine, such as a full disk.
"""

import errno
import importlib
import re
from typing import Any


class RadqError(Exception):
    """The base class of all errors of radq."""

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} hint: {self.hint}"


class OptionError(RadqError, ValueError):
    """An option or argument with a value that is not allowed."""


class ModelError(RadqError, OSError):
    """A model or tokenizer that is missing, damaged, or of a kind radq cannot use."""


class CheckpointError(RadqError, ValueError):
    """A checkpoint of the public code that cannot be converted."""


class DataError(RadqError, ValueError):
    """A data file that cannot be read, or a row in it that cannot be used."""


class UnknownAttributeError(RadqError, KeyError):
    """An attribute that a reward model was not trained on."""


class VocabularyError(RadqError, ValueError):
    """Two models whose token ids stand for different tokens."""


class ContextLengthError(RadqError, ValueError):
    """More tokens than a model has positions for."""


class RewardValueError(RadqError, ArithmeticError):
    """A reward model that returned NaN or infinity."""


class TrainingError(RadqError, ArithmeticError):
    """A training run whose loss or weights became NaN or infinite."""


class StoppedError(RadqError, KeyboardInterrupt):
    """A training run that Ctrl-C has stopped, with a checkpoint to go on from."""


class ServerError(RadqError, ConnectionError):
    """A server that does not answer, or that refuses the requests of radq."""


class WriteError(RadqError, OSError):
    """A file that cannot be written, for example because the disk is full."""


class MemoryLimitError(RadqError, MemoryError):
    """Work that needs more memory than this machine has."""


# Messages of libraries when memory or disk is full, in errors whose type does not say so.
FULL_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)
FAILED_WRITE = re.compile(r"os error \d+|PytorchStreamWriter failed|No space left|unexpected pos", re.IGNORECASE)


def explain(error: BaseException) -> str | None:
    """One line about an error that a user can act on; None for any other error, which is then a bug of radq."""
    if isinstance(error, RadqError):
        return _one_line(str(error))
    reason = _reason(error)
    if fills_memory(error):
        return f"memory is full: {reason}. hint: use smaller batches, shorter texts or a smaller model."
    reason = find_file_problem(error)
    if reason is None:
        return None
    if not isinstance(error, OSError):
        return f"a file cannot be read or written: {reason}. hint: check that the disk has room and the file is whole."
    place = "" if error.filename is None else f"{str(error.filename)!r}: "
    hint = "make room on the disk." if error.errno == errno.ENOSPC else "check the path and its permissions."
    return f"{place}{reason}. hint: {hint}"


def fills_memory(error: BaseException) -> bool:
    """Whether there was no memory left, of the machine or of a GPU."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and FULL_MEMORY.search(_reason(error)) is not None
    )


def find_file_problem(error: BaseException) -> str | None:
    """The reason why a file could not be read or written; None if the error is not about files."""
    if isinstance(error, OSError):
        return error.strerror or _reason(error)
    if isinstance(error, RuntimeError) and FAILED_WRITE.search(str(error)):  # torch's message tells byte positions only
        return "a file was written only in part"
    if type(error).__name__ == "SafetensorError" and FAILED_WRITE.search(str(error)):
        return _reason(error)
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type where it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _reason(error: BaseException) -> str:
    return _one_line(str(error)).rstrip(".") or type(error).__name__


def _one_line(text: str) -> str:
    return " ".join(text.split())


def require_package(module: str, extra: str) -> Any:
    """Import an optional package, or raise an error that names the extra of radq that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(
            f"this needs the package {error.name or module}, which is not installed.", install_hint(extra)
        ) from error


def install_hint(extra: str) -> str:
    """The command that installs an extra, for a checkout and for an installed radq."""
    return f"run pip install -e '.[{extra}]' in a checkout of radq, or else pip install 'radq[{extra}]'."
