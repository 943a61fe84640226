"""The processes that train together, as `torchrun` and `accelerate launch` start them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from accelerate import PartialState
from accelerate.utils import gather_object

from radq.errors import OptionError, RadqError
from radq.training.arguments import training_device
from radq.training.run_config import TrainingConfig

LONGEST_WAIT = 24 * 3600  # seconds: one process may tokenise or ask a teacher for hours while the others wait


def join_processes(config: TrainingConfig) -> PartialState:
    """Connect the processes of a run. On CPUs accelerate connects them only if it is told that they train there."""
    wait = config.trainer.get("ddp_timeout", LONGEST_WAIT)
    if not isinstance(wait, int) or not 0 < wait < 2**31:
        raise OptionError(
            f"ddp_timeout must be a whole number of seconds, got {wait!r}.", "write a number above 0 under `trainer:`."
        )
    return PartialState(cpu=training_device(config) == "cpu", timeout=timedelta(seconds=wait))


@contextmanager
def first_process_first() -> Iterator[None]:
    """Let the first process of each machine do the work of the block, and then the others, who find its files.

    An error of radq in a first process stops all, so that the others do not complain about a lost connection.
    """
    is_first = PartialState().is_local_main_process
    if not is_first:
        _hear_of_errors()
    try:
        yield
    except RadqError as error:
        if is_first:
            gather_object([error])
        raise
    if is_first:
        _hear_of_errors()


def _hear_of_errors() -> None:
    """Say that this process has none, wait until all have said so too, and raise the error of one that has."""
    for error in gather_object([None]):
        if error is not None:
            raise error
