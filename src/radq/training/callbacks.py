"""Callbacks of radq's trainers: epochs, evaluation of the last weights, metrics.jsonl, and checkpoints by the clock."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from radq.data.batches import GlobalBatches
from radq.errors import DataError
from radq.files import append_lines, read_lines, whole_file
from radq.training.config import TrainingConfig

STOPPING = "\nstopping after this step with a checkpoint; Ctrl-C again stops at once without one\n"


def point_to_best(state: TrainerState, out: Path) -> None:
    """Set the folder of the best checkpoint: the Trainer remembers the folder in which it was saved before the move."""
    if state.best_global_step:
        state.best_model_checkpoint = str(out / f"checkpoint-{state.best_global_step}")


class RunCallback(TrainerCallback):
    """Takes log, evaluation and save steps from the settings, not from a checkpoint, and evaluates the last weights.

    The sampler of batches is told which epoch it is.
    """

    def __init__(self, config: TrainingConfig, batches: GlobalBatches):
        self.config, self.batches = config, batches

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)
        point_to_best(state, Path(self.config.out))

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.batches.epoch = int((state.epoch or 0) + 1e-6)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.config.chooses_best and state.global_step >= state.max_steps:
            control.should_evaluate = True


class MetricsCallback(TrainerCallback):
    """Writes a line of metrics.jsonl per log. A resumed run first drops the lines of steps that it repeats."""

    def __init__(self, file: Path):
        self.file = file

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in self._read() if row["step"] <= state.global_step]
        with whole_file(self.file) as temporary, temporary.open("wb") as stream:
            append_lines(stream, kept)

    def _read(self) -> Iterator[dict[str, Any]]:
        """Rows up to the first damaged line; metrics are a record, so damage does not keep a run from going on."""
        with contextlib.suppress(FileNotFoundError, DataError):
            yield from read_lines(self.file)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        with self.file.open("ab") as stream:
            append_lines(stream, [{"step": state.global_step, "epoch": state.epoch, **(logs or {})}])


class SavingCallback(TrainerCallback):
    """Asks for a checkpoint when some minutes have passed, and ends the run with one when it is to stop.

    It is for a single process: several would have to agree on the step.
    """

    def __init__(self, minutes: float):
        self.seconds = 60 * minutes
        self.saved = time.monotonic()
        self.stop = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.saved = time.monotonic()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.saved = time.monotonic()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stop:
            control.should_save = control.should_training_stop = True
        elif time.monotonic() - self.saved >= self.seconds:
            control.should_save = True

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Let the first Ctrl-C (or SIGTERM) inside the block stop the run with a checkpoint, and the second at once."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, *_: Any) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        os.write(2, STOPPING.encode())  # print might be interrupted in the middle of a line by itself
