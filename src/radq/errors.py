"""Errors a user can act on: the message says what was wrong, with the value, and the hint says what to do.

Every class is also the stdlib type a caller would expect. The command line prints `error: … hint: …` and exits with 2.
`explain` finds such a line also for errors of other libraries that come from the machine, such as a full disk.
"""

import errno
import importlib
import re
from typing import Any


class RadqError(Exception):
    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} hint: {self.hint}"


class OptionError(RadqError, ValueError):
    """An argument with a value that is not allowed."""


class ModelError(RadqError, OSError):
    """A model or tokenizer that is missing, damaged, or of a kind radq cannot use."""


class CheckpointError(RadqError, ValueError):
    """A checkpoint of the public code that cannot be converted."""


class DataError(RadqError, ValueError):
    """A file that cannot be read, or a row with a value that is not allowed."""


class UnknownAttributeError(RadqError, KeyError):
    """An attribute the reward model was not trained on."""


class VocabularyError(RadqError, ValueError):
    """A base model and a reward model that disagree about what a token id means."""


class ContextLengthError(RadqError, ValueError):
    """More tokens than a model has positions for."""


class RewardValueError(RadqError, ArithmeticError):
    """A reward model that returned NaN or infinity."""


class TrainingError(RadqError, ArithmeticError):
    """A training whose loss or weights became NaN or infinite."""


class WriteError(RadqError, OSError):
    """A file that could not be written, for example because the disk is full."""


class MemoryLimitError(RadqError, MemoryError):
    """Work that needs more memory than the machine has."""


# Messages of libraries about full memory and failed writes, in errors whose type does not tell.
FULL_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)
FAILED_WRITE = re.compile(r"os error \d+|PytorchStreamWriter failed|No space left|unexpected pos", re.IGNORECASE)


def explain(error: BaseException) -> str | None:
    """One line for the user about an error of their input or their machine; None for an error that must be a bug."""
    if isinstance(error, RadqError):
        return _one_line(str(error))
    reason = _reason(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and FULL_MEMORY.search(reason)):
        return f"memory is full: {reason}. hint: use smaller batches, shorter texts or a smaller model."
    reason = find_file_problem(error)
    if reason is None:
        return None
    if not isinstance(error, OSError):
        return f"a file cannot be read or written: {reason}. hint: is the disk full, or the file damaged?"
    place = "" if error.filename is None else f"{str(error.filename)!r}: "
    hint = "make room on the disk." if error.errno == errno.ENOSPC else "check the path, and who may read and write it."
    return f"{place}{reason}. hint: {hint}"


def find_file_problem(error: BaseException) -> str | None:
    """The reason why a file could not be read or written; None if the error is not about files."""
    if isinstance(error, OSError):
        return error.strerror or _reason(error)
    if isinstance(error, RuntimeError) and FAILED_WRITE.search(str(error)):  # torch's message tells byte positions only
        return "a file was written only in part"
    if type(error).__name__ == "SafetensorError" and FAILED_WRITE.search(str(error)):
        return _reason(error)
    return None


def _reason(error: BaseException) -> str:
    return _one_line(str(error)).rstrip(".") or type(error).__name__


def _one_line(text: str) -> str:
    return " ".join(text.split())


def require_package(module: str, extra: str) -> Any:
    """Import a module, or raise an error that names the extra of radq that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(
            f"this needs the package {error.name or module}, which is not installed.", f"pip install 'radq[{extra}]'."
        ) from error
