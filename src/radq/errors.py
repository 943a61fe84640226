"""Errors a user can act on: what was wrong, with the value, and a hint at the way out.

Every class is also the stdlib type a caller would expect. The command line prints `error: … hint: …` and exits with 2.
"""


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
