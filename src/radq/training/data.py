"""Data of a training run, and the settings that depend on them.

A recipe chooses the settings that a user leaves open. `auto` looks at the number of rows and tokens, the backbone, LoRA
or not, and CPU or GPU, but never at the speed of the machine, so that a command gives the same weights everywhere. Its
numbers come from a search over rates, steps, batches and layers on eight small tables (docs/training.md). `paper` takes
those of the paper.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from radq.data.dataset import RewardData, load_data
from radq.data.examples import DataColumns
from radq.data.label_scale import KEPT, LabelScale, read_scale
from radq.data.pairs import ResponseColumns, load_pairs
from radq.data.tables import Rows, store_rows
from radq.errors import DataError, ModelError
from radq.models.config import RewardModelConfig
from radq.training.config import RewardTrainingConfig, TrainingConfig
from radq.training.losses import LOSSES
from radq.training.trainer_setup import training_device

Config = TypeVar("Config", bound=TrainingConfig)
Scales = Sequence[LabelScale | None] | None

# --- recipes ---

PAPER: dict[str, Any] = {
    "max_length": 512,
    "eval_share": 0.0,
    "epochs": 5.0,
    "batch_size": 100,
    "learning_rate": 1e-5,
    "warmup_steps": 0,
    "save_steps": 500,
}
LONGEST = 512  # tokens of a text that are tokenised, unless the user asks for another number
HELD_OUT_SHARE, HELD_OUT_MOST, HELD_OUT_LEAST_ROWS = 0.1, 1000, 20

WORK = {"cpu": 2e13, "gpu": 2e16}  # operations of a run: some minutes on two cores, or on a GPU
TRAINED_SHARE = 0.4  # of this work, and of the least steps: enough for the copy of a teacher, or for a second stage
LEAST_PASSES = {"cpu": 0.0, "gpu": 1.0}
MOST_PASSES = {"cpu": 6.0, "gpu": 3.0}
LEAST_STEPS, MOST_PASSES_FOR_STEPS = 150, 20.0  # a small table is read more often, until there are enough steps
BATCH_SIZE = {"cpu": 16, "gpu": 32}
SMALL_BATCH, FEW_STEPS, SHORT = 8, 200, 48  # few steps of short texts on average learn more in smaller batches
CPU_LENGTHS = (128, 64)
CPU_LAYERS = (12, 8, 6, 4)
CPU_LAYERS_LONG = 6  # texts are cut shorter rather than the backbone below this number of layers
WANTED_PASSES = 1.4  # on a CPU, so many passes over the data are worth more than deeper layers
RATE, RATE_WIDTH, RATE_LAYERS, HIGHEST_RATE = 2e-4, 576, 12, 1e-3  # of a whole backbone of this width and depth
LORA_RATE, HIGHEST_LORA_RATE, LORA_HEAD_SHARE = 1e-3, 5e-3, 0.1
READOUT_RATE = 1e-3
WARMUP_SHARE = 0.1


@dataclass(frozen=True)
class Task:
    """A task holds what the choice depends on: the data, the model and the device."""

    lengths: np.ndarray  # (n,): tokens of each row
    width: int  # of the hidden states
    num_layers: int  # of the backbone
    device: str  # cpu or gpu
    lora: bool = False
    readout: bool = False  # of a backbone that is read whole, and not trained
    may_cut_layers: bool = True  # not those of a trained model
    may_cut_texts: bool = True  # not where a prompt stands before each text
    texts_per_row: int = 1  # two for pairs

    def tokens(self, max_length: int) -> int:
        """Number of tokens of one pass over the data."""
        return int(np.minimum(self.lengths, max_length).sum())

    def passes(self, max_length: int, num_layers: int) -> float:
        """Number of passes over the data that the work of a run allows."""
        operations = 2 if self.readout else 6  # for each weight: 2 forward, and 4 back
        work_per_token = operations * 12 * self.width**2 * num_layers  # 12 d² weights in a layer
        work = WORK[self.device] * (1 if self.may_cut_layers else TRAINED_SHARE)
        return work / (work_per_token * max(1, self.tokens(max_length) * self.texts_per_row))


def held_out_share(config: TrainingConfig, num_rows: int) -> float:
    """Share of the rows that is kept for evaluation."""
    if config.eval_share is not None:
        return config.eval_share
    if config.recipe == "paper" or config.eval_data or num_rows < HELD_OUT_LEAST_ROWS:
        return 0.0
    return min(HELD_OUT_SHARE, HELD_OUT_MOST / num_rows)


def complete(config: Config, task: Task) -> Config:
    """The settings with a value for each that was left open; `task` holds the rows that are trained on."""
    if config.recipe == "paper":
        return _fill(config, **PAPER)
    max_length = config.max_length or _choose_length(task)
    num_layers = min(config.num_layers or _choose_layers(task, max_length), task.num_layers)
    config = _fill(config, max_length=max_length)
    if task.may_cut_layers and not task.readout:
        config = _fill(config, num_layers=num_layers)
    affordable = task.passes(max_length, num_layers)
    passes = config.epochs or float(np.clip(affordable, LEAST_PASSES[task.device], MOST_PASSES[task.device]))
    batch_size = config.batch_size or _choose_batch(task, max_length, passes)
    if config.epochs is None and config.max_steps < 0:  # passes over a small table until there are enough steps
        least = LEAST_STEPS * (1 if task.may_cut_layers else TRAINED_SHARE)
        passes = max(passes, min(MOST_PASSES_FOR_STEPS, least * batch_size / len(task.lengths)))
    rate = config.learning_rate
    rate = float(f"{_choose_rate(task, num_layers):.2g}") if rate is None else rate
    config = _fill(config, epochs=float(f"{passes:.2g}"), batch_size=batch_size, learning_rate=rate)
    if task.lora:
        config = _fill(config, head_learning_rate=rate * LORA_HEAD_SHARE)
    return _fill(config, warmup_steps=round(WARMUP_SHARE * num_steps(config, len(task.lengths))))


def num_steps(config: TrainingConfig, num_rows: int) -> int:
    """Number of optimizer steps of a run whose settings are complete."""
    if config.max_steps > 0:
        return config.max_steps
    assert config.epochs is not None
    assert config.batch_size is not None
    return int(np.ceil(config.epochs * -(-num_rows // config.batch_size)))


def _fill(config: Config, **values: Any) -> Config:
    """Set the settings that are still open."""
    return replace(config, **{name: value for name, value in values.items() if getattr(config, name, 0) is None})


def _choose_length(task: Task) -> int:
    if task.device == "gpu" or not task.may_cut_texts:
        return LONGEST
    longer, shorter = CPU_LENGTHS
    return longer if task.passes(longer, CPU_LAYERS_LONG) >= WANTED_PASSES else shorter


def _choose_layers(task: Task, max_length: int) -> int:
    if task.device == "gpu" or not task.may_cut_layers or task.readout:
        return task.num_layers
    enough = (number for number in CPU_LAYERS if task.passes(max_length, number) >= WANTED_PASSES)
    return next(enough, CPU_LAYERS[-1])


def _choose_batch(task: Task, max_length: int, passes: float) -> int:
    batch_size = BATCH_SIZE[task.device]
    few = passes * len(task.lengths) / batch_size < FEW_STEPS
    short = task.tokens(max_length) < SHORT * len(task.lengths)
    return SMALL_BATCH if task.device == "cpu" and few and short else batch_size


def _choose_rate(task: Task, num_layers: int) -> float:
    """Wider and deeper backbones need smaller rates."""
    narrower = RATE_WIDTH / task.width
    if task.readout:
        return min(HIGHEST_RATE, READOUT_RATE * narrower)
    if task.lora:
        return min(HIGHEST_LORA_RATE, LORA_RATE * narrower)
    return min(HIGHEST_RATE, RATE * narrower * min(1.0, (RATE_LAYERS / num_layers) ** 0.5))


# --- rows ---


@dataclass
class Start:
    """A start holds what is known of a model before it is trained, or even loaded.

    Args:
        max_tokens: the room for a text; None without a limit.
        may_cut_layers: False for a model that was trained before, whose layers all stay.
        lora: whether adapters are trained beside a frozen backbone.
        readout: whether a readout of a frozen backbone is trained.
    """

    tokenizer: PreTrainedTokenizerBase
    backbone: PreTrainedConfig
    max_tokens: int | None
    may_cut_layers: bool = True
    lora: bool = False
    readout: bool = False


@dataclass
class RunData(Generic[Config]):
    """The data of a run, with the settings that were completed for them."""

    config: Config
    train: RewardData
    evaluation: RewardData | None


def keep_rows(config: Config, data: Rows, eval_data: Rows, progress: bool) -> Config:
    """Name files with the rows that a program gives, beside those of the settings; None stands for no rows.

    The settings are checked first, since reading the rows may take long.
    """
    given = {name: rows for name, rows in {"data": data, "eval_data": eval_data}.items() if rows is not None}
    replace(config, **{name: [*getattr(config, name), name] for name in given}).check()
    for name, rows in given.items():
        file = store_rows(rows, config.columns, config.cache, progress, config.optional_columns)
        config = replace(config, **{name: [*getattr(config, name), str(file)]})
    return config


def load_run_data(config: Config, start: Start, progress: bool, scales: Scales = None) -> RunData[Config]:
    """Load the data to train on and to evaluate on, and choose the settings that are open.

    Texts are cut to the smaller of `config.max_length` and the room that the model has. Unless `scales` are known, the
    data to train on decide how labels become numbers, also those of the evaluation.
    """
    found = _load_parts(replace(config, max_length=config.max_length or LONGEST), start, scales, progress)
    whole_backbone = start.backbone.get_text_config()
    task = Task(
        found.train.lengths,
        whole_backbone.hidden_size,
        whole_backbone.num_hidden_layers,
        "cpu" if training_device(config) == "cpu" else "gpu",
        start.lora,
        start.readout,
        start.may_cut_layers,
        may_cut_texts=config.prompt is None and (config.compares or not found.train.prompt_lengths.any()),
        texts_per_row=2 if config.compares else 1,
    )
    config.check_evaluation(found.evaluation is not None)
    completed = complete(replace(config, eval_share=found.config.eval_share), task)
    if completed.max_length != found.config.max_length:  # texts are tokenised again, as if this length had been given
        found = _load_parts(completed, start, found.train.scales, progress)
    if progress:
        scaled = [] if config.compares else zip(config.attributes, found.train.scales, strict=True)
        print(found.train.describe(), *(scale.describe(name) for name, scale in scaled), sep="\n")
    return RunData(completed, found.train, found.evaluation)


def _load_parts(config: Config, start: Start, scales: Scales, progress: bool) -> RunData[Config]:
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
    config = replace(config, eval_share=held_out_share(config, len(data)))
    eval_data = load(config.eval_data, data.scales) if config.eval_data else None
    if eval_data is None and config.eval_share:
        data, eval_data = data.split(config.eval_share, config.seed)
    elif eval_data is not None:
        eval_data = _leave_out_unlabelled(eval_data, config, progress)
    if config.optional_columns:
        _require_labels(data, config.optional_columns)
    for part in (data, eval_data):
        if part is not None and not part.weights[part.rows].any():
            kind = "train" if part is data else "evaluate"
            raise DataError(f"{config.weight!r} is 0 in all rows to {kind} on.", "give some rows a weight above 0.")
    return RunData(config, data, eval_data)


def _leave_out_unlabelled(data: RewardData, config: TrainingConfig, progress: bool) -> RewardData:
    """Leave out the rows without any label, unless the targets are a teacher's rewards."""
    if not config.optional_columns or (isinstance(config, RewardTrainingConfig) and config.learns_tokens):
        return data
    labelled = (~np.isnan(data.labels[data.rows])).sum(1) > 0
    if progress and (left_out := int((~labelled).sum())):
        print(f"{left_out} row{'s' * (left_out > 1)} without any label {'are' if left_out > 1 else 'is'} left out")
    return data.where(labelled)


def _require_labels(data: RewardData, names: list[str]) -> None:
    """Refuse rows to train on of which none with a weight has a label of some name."""
    labelled = ~np.isnan(data.labels[data.rows]) & (data.weights[data.rows] > 0)[:, None]
    for name, some in zip(names, labelled.any(0), strict=True):
        if not some:
            raise DataError(f"no row to train on has a label {name!r}.", "give more rows, or lower --eval-share.")


def check_labels(data: RewardData, attributes: list[str], loss: str) -> None:
    """Refuse labels that the loss does not allow, and warn of labels that are the same in every row."""
    allowed = LOSSES[loss].label_range
    for attribute, (low, high) in zip(attributes, data.label_limits, strict=True):
        if low == high:
            warnings.warn(f"label {attribute!r} is {low:g} in every row: there is nothing to learn.", stacklevel=2)
        if allowed is not None and not allowed[0] <= low <= high <= allowed[1]:
            raise DataError(
                f"the loss {loss!r} needs labels from {allowed[0]:g} to {allowed[1]:g}, but {attribute!r} runs from "
                f"{low:g} to {high:g}.",
                "leave --keep-labels out, or choose another --loss.",
            )


def scales_of_model(config: RewardModelConfig, source: str) -> list[LabelScale | None]:
    """The scales of the labels that a reward model was trained on, one per attribute; None for an unknown one.

    Models of earlier versions store none; where their labels lay outside [0, 1], they were used as they were.
    """
    if config.label_scales is None:
        return [None if limits == (0.0, 1.0) else KEPT for limits in config.attribute_ranges]
    if len(config.label_scales) != len(config.attributes):
        raise ModelError(f"{source!r} has scales for other labels than its attributes.", "train the model again.")
    return [read_scale(stored, source) for stored in config.label_scales]
