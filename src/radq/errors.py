"""Errors a user can act on: what was wrong, with the value, and a hint at the way out.

Every class is also the stdlib type a caller would expect. The command line prints `error: … hint: …` and exits with 2.
`explain` finds such a line also for errors of other libraries that are a matter of the machine and not of the code.
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
    """An argument outside its range."""


class ModelError(RadqError, OSError):
    """A model or tokenizer that is missing, damaged, or of a kind radq cannot use."""


class CheckpointError(RadqError, ValueError):
    """A checkpoint of the public code that cannot be converted."""


class DataError(RadqError, ValueError):
    """A file that cannot be read, or a row in it that makes no sense."""


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
    """A disk that is full, or does not take what is written to it."""


class MemoryLimitError(RadqError, MemoryError):
    """Work that does not fit this machine."""


# What libraries say when memory or disk is full, in errors whose type says nothing.
FULL_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)
FAILED_WRITE = re.compile(r"os error \d+|PytorchStreamWriter failed|No space left|unexpected pos", re.IGNORECASE)


def explain(error: BaseException) -> str | None:
    """One line for the user about an error that is theirs or their machine's; None for what must be a bug."""
    if isinstance(error, RadqError):
        return _one_line(str(error))
    if isinstance(error, OSError):
        return _explain_os_error(error)
    reason = _one_line(str(error)) or type(error).__name__
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and FULL_MEMORY.search(reason)):
        return f"memory is full: {reason}. hint: use smaller batches, shorter texts or a smaller model."
    if FAILED_WRITE.search(reason) and (isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"):
        return f"a file cannot be read or written: {reason}. hint: is the disk full, or the file damaged?"
    return None


def _explain_os_error(error: OSError) -> str:
    what = error.strerror or _one_line(str(error)) or type(error).__name__
    place = "" if error.filename is None else f"{str(error.filename)!r}: "
    hint = "make room on the disk." if error.errno == errno.ENOSPC else "check the path, and who may read and write it."
    return f"{place}{what}. hint: {hint}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def require_package(module: str, extra: str) -> Any:
    """The module, or an error that names the extra it comes with."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(
            f"this needs the package {error.name or module}, which is not installed.", f"pip install 'radq[{extra}]'."
        ) from error
