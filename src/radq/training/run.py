"""The beginning of every training run, be it of a reward model or of experts: its processes, data, folder and plan.

A kind of run is a subclass of `TrainingRun`, whose constructor checks and enters the run folder. Its `train` loads the
data, refuses changes since the run that it resumes, begins the run folder, and trains. If several processes are
launched, as `torchrun` and `accelerate launch` start them, each has a run of its own, and the first one writes.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from radq.data.dataset import RewardData, load_data
from radq.data.examples import DataColumns
from radq.data.label_scale import LabelScale
from radq.data.pairs import ResponseColumns, load_pairs
from radq.data.tables import Rows, store_rows
from radq.errors import DataError, OptionError, RadqError
from radq.files import atomic_file, explained_writing
from radq.training.config import RewardTrainingConfig, TrainingConfig
from radq.training.run_folder import RESULTS, begin_run, check_run, read_scales, take_settings_of_run
from radq.training.trainer import BatchTrainer
from radq.training.trainer_setup import LONGEST, Config, Task, complete, held_out_share, num_steps, training_device

LONGEST_WAIT = 24 * 3600  # seconds: one process may tokenise or ask a teacher for hours while the others wait
TRIALS = 3  # the fastest counts: other programs may disturb one of them, and a step is captured in the second
MORE_THAN_STEPS = 1.1  # a run also updates weights, evaluates and saves

Scales = Sequence[LabelScale | None] | None


@dataclass
class Start:
    """A start holds what is known of a model before it is trained, or even loaded."""

    tokenizer: PreTrainedTokenizerBase
    backbone: PreTrainedConfig
    max_tokens: int | None  # the room for a text; None without a limit
    may_cut_layers: bool = True  # not those of a model that was trained before
    lora: bool = False  # adapters are trained beside a frozen backbone
    readout: bool = False  # a readout of a frozen backbone is trained


class TrainingRun(Generic[Config]):
    """A run in the folder `config.out`, of which this process is one; the options are those of `radq.train`."""

    data: RewardData  # that of `load_data`, to train on
    eval_data: RewardData | None

    def __init__(self, config: Config, resume: bool, overwrite: bool, progress: bool, data: Rows, eval_data: Rows):
        config = _store_given_rows(config, data, eval_data, progress)
        check_run(config, resume, overwrite)
        self.out, self.resume, self.progress = Path(config.out), resume, progress
        self.processes = join_processes(config)
        self.shows = progress and self.processes.is_main_process
        self.processes.wait_for_everyone()  # all have looked before one writes
        self.config = take_settings_of_run(self.out, config) if resume else config

    def load_data(self, start: Start, scales: Scales = None) -> None:
        """Load the data to train on and to evaluate on, and choose the settings that are open.

        Texts are cut to the smaller of `max_length` and the room that the model has. Labels become numbers as in the
        run that is resumed, or else by `scales`; None leaves that to the data to train on.
        """
        config = self.config
        known = read_scales(self.out, config) if self.resume else None
        scales = scales if known is None else known
        with_length = replace(config, max_length=config.max_length or LONGEST)
        share, data, eval_data = _load_parts(with_length, start, scales, self.shows)
        config.check_evaluation(eval_data is not None)
        backbone = start.backbone.get_text_config()
        task = Task(
            data.lengths,
            backbone.hidden_size,
            backbone.num_hidden_layers,
            "cpu" if training_device(config) == "cpu" else "gpu",
            start.lora,
            start.readout,
            start.may_cut_layers,
            may_cut_texts=config.prompt is None and (config.compares or not data.prompt_lengths.any()),
            texts_per_row=2 if config.compares else 1,
        )
        config = complete(replace(config, eval_share=share), task)
        if config.max_length != with_length.max_length:  # texts are tokenised again, as if this had been given
            _, data, eval_data = _load_parts(config, start, data.scales, self.shows)
        self.config, self.data, self.eval_data = config, data, eval_data
        if self.shows:
            scaled = [] if config.compares else zip(config.attributes, data.scales, strict=True)
            print(data.describe(), *(scale.describe(name) for name, scale in scaled), sep="\n")

    def fingerprint_data(self, **others: str) -> dict[str, str]:
        """Fingerprints of the data, and those `others`, which a resumed run must find unchanged."""
        evaluated = {} if self.eval_data is None else {"eval_data": self.eval_data.fingerprint}
        return {"data": self.data.fingerprint, **others, **evaluated}

    def begin(self, contents: dict[str, str]) -> None:
        """Write the files with which a run begins; unless it is resumed, delete an earlier one."""
        if self.processes.is_main_process:
            begin_run(self.out, self.config, contents, self.data.scales, self.resume)

    def fit(self, trainer: BatchTrainer, checkpoint: Path | None) -> dict[str, float]:
        """Say what will be trained, train it, and return the metrics."""
        if self.shows:
            print(describe_plan(trainer))
        return trainer.train_and_evaluate(checkpoint)


def write_results(folder: Path, results: dict[str, Any], indent: int | None = None) -> None:
    """Write the results of a model, which are there when its training has ended."""
    with explained_writing(folder), atomic_file(folder / RESULTS) as file:
        file.write_text(json.dumps(results, indent=indent))


# --- data ---


def _store_given_rows(config: Config, data: Rows, eval_data: Rows, progress: bool) -> Config:
    """Name files with the rows that a program gives, beside those of the settings; None stands for no rows.

    The settings are checked first, since reading the rows may take long.
    """
    given = {name: rows for name, rows in {"data": data, "eval_data": eval_data}.items() if rows is not None}
    replace(config, **{name: [*getattr(config, name), name] for name in given}).check()
    for name, rows in given.items():
        file = store_rows(rows, config.columns, config.cache, progress, config.optional_columns)
        config = replace(config, **{name: [*getattr(config, name), str(file)]})
    return config


def _load_parts(
    config: TrainingConfig, start: Start, scales: Scales, progress: bool
) -> tuple[float, RewardData, RewardData | None]:
    """Load the data to train on and to evaluate on; the share of the rows that is held out stands before them."""
    assert config.max_length is not None
    max_length = min(config.max_length, start.max_tokens or config.max_length)
    spans = (config.spans or None) if isinstance(config, RewardTrainingConfig) else None

    def load(sources: list[str], scales: Scales) -> RewardData:
        if isinstance(config, RewardTrainingConfig) and config.compares:
            named = config.response_columns, config.scores or None, config.prompt, config.weight, config.skip_empty
            rest = max_length, config.cache, progress, config.max_pairs, config.seed
            return load_pairs(sources, start.tokenizer, ResponseColumns(*named), *rest)
        named = config.text, config.label_columns, config.prompt, config.weight
        rest = config.label_rules, config.skip_empty, spans
        columns = DataColumns(*named, *rest, missing_labels=bool(config.optional_columns))
        return load_data(sources, start.tokenizer, columns, max_length, config.cache, progress, scales)

    data = _leave_out_unlabelled(load(config.data, scales), config, progress)
    share, eval_data = held_out_share(config, len(data)), None
    if config.eval_data:
        eval_data = _leave_out_unlabelled(load(config.eval_data, data.scales), config, progress)
    elif share:
        data, eval_data = data.split(share, config.seed)
    if config.optional_columns:
        labelled = ~np.isnan(data.labels[data.rows]) & (data.weights[data.rows] > 0)[:, None]
        for name, some in zip(config.optional_columns, labelled.any(0), strict=True):
            if not some:
                raise DataError(f"no row to train on has a label {name!r}.", "give more rows, or lower --eval-share.")
    for part in (data, eval_data):
        if part is not None and not part.weights[part.rows].any():
            kind = "train" if part is data else "evaluate"
            raise DataError(f"{config.weight!r} is 0 in all rows to {kind} on.", "give some rows a weight above 0.")
    return share, data, eval_data


def _leave_out_unlabelled(data: RewardData, config: TrainingConfig, progress: bool) -> RewardData:
    """Leave out the rows without any label, unless the targets are a teacher's rewards."""
    if not config.optional_columns or (isinstance(config, RewardTrainingConfig) and config.learns_tokens):
        return data
    labelled = (~np.isnan(data.labels[data.rows])).sum(1) > 0
    if progress and (left_out := int((~labelled).sum())):
        print(f"{left_out} row{'s' * (left_out > 1)} without any label {'are' if left_out > 1 else 'is'} left out")
    return data.where(labelled)


# --- processes ---


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


# --- the plan of a BatchTrainer; transformers' types say that its model and data may be missing ---


def describe_plan(trainer: Any) -> str:
    """Say in one line what is trained with which settings, chosen or given, and how long it will take here."""
    config, rows, held_out = trainer.settings, len(trainer.train_dataset), len(trainer.eval_dataset or ())
    steps = num_steps(config, rows)
    parts = [
        _describe_layers(trainer.model.config),
        f"texts of at most {config.max_length} tokens",
        f"{rows}{' pairs' * config.compares} to train on and {held_out or 'none'} held out",
        f"{config.epochs:g} passes in {steps} steps" if config.max_steps < 0 else f"{steps} steps",
        f"{config.batch_size} {'pairs' if config.compares else 'texts'} a step",
        f"learning rate {config.learning_rate:g}",
    ]
    if (feed := getattr(trainer, "feed", None)) is not None:
        _, p, k = feed.candidates.candidates.shape
        parts.append(f"{len(feed.candidates)} prefixes with {k} candidates at each of {p} places")
    seconds = estimate_seconds(trainer, steps)
    duration = "" if seconds is None else f"; about {format_duration(seconds)} on this machine"
    return f"recipe {config.recipe}: {', '.join(parts)}{duration}"


def _describe_layers(config: Any) -> str:
    depth = getattr(config, "backbone", config).num_hidden_layers
    if readout := getattr(config, "readout", None):
        return f"a readout of {len(readout['layers'])} of {depth} layers"
    rank = getattr(config, "lora_rank", 0)
    return f"{depth} layers" + (f" with LoRA of rank {rank}" if rank else "")


def estimate_seconds(trainer: Any, steps: int) -> float | None:
    """Estimate the time of all steps from that of one batch of average size; None if there are several processes.

    The random numbers are put back, so that the estimate does not change the run.
    """
    if trainer.args.world_size > 1 or trainer.is_fsdp_enabled:
        return None
    plan = trainer.batches.plan()
    sizes = np.array([len(batch) * trainer.batches.lengths[batch].max() for batch in plan])  # with padding
    typical = int(np.abs(sizes - sizes.mean()).argmin())
    rows = plan[typical][: trainer.args.per_device_train_batch_size]
    batch = trainer.collate_for_training(trainer.train_dataset.batch(rows.tolist()))
    with torch.random.fork_rng():
        seconds = min(_time_step(trainer, batch) for _ in range(TRIALS))
    trainer.forget_captures()  # of a model that the Trainer has not prepared yet
    return seconds * len(plan[typical]) / len(rows) * sizes.mean() / sizes[typical] * steps * MORE_THAN_STEPS


def _time_step(trainer: Any, batch: dict[str, torch.Tensor]) -> float:
    """Measure the seconds of a forward and a backward pass, whose gradients are thrown away."""
    model = trainer.model.to(trainer.args.device).train()
    began = time.perf_counter()
    items = trainer._get_num_items_in_batch([batch], trainer.args.device)
    trainer.add_gradients(model, batch, items).item()  # waits for a GPU
    model.zero_grad()
    return time.perf_counter() - began


def format_duration(seconds: float) -> str:
    """Write a duration in words, such as "2 min 40 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{max(1, rest)} s"
