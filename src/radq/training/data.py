"""Data of a training run: the rows to train on and the rows to evaluate on, with labels on one scale.

The settings that are left open depend on the data, so they are chosen here (`radq.training.recipe`).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from radq.data.dataset import RewardData, load_data
from radq.data.examples import DataColumns
from radq.data.label_scale import KEPT, LabelScale, read_scale
from radq.data.pairs import PairData, ResponseColumns, load_pairs
from radq.data.rows import Rows, store_rows
from radq.data.spans import load_spans
from radq.errors import DataError, ModelError
from radq.models.config import RewardModelConfig
from radq.training.arguments import training_device
from radq.training.config import RewardTrainingConfig, TrainingConfig
from radq.training.losses import LOSSES
from radq.training.recipe import LONGEST, Config, Task, complete, held_out_share

Scales = Sequence[LabelScale | None] | None


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
        _describe(found)
    return RunData(completed, found.train, found.evaluation)


def _load_parts(config: Config, start: Start, scales: Scales, progress: bool) -> RunData[Config]:
    assert config.max_length is not None
    max_length = min(config.max_length, start.max_tokens or config.max_length)

    spans = (config.spans or None) if isinstance(config, RewardTrainingConfig) else None

    def load(sources: list[str], scales: Scales) -> RewardData:
        if isinstance(config, RewardTrainingConfig) and config.compares:
            return _load_pairs(sources, config, start.tokenizer, max_length, progress)
        columns = DataColumns(
            config.text,
            config.label_columns,
            config.prompt,
            config.weight,
            config.label_rules,
            config.skip_empty,
            spans,
            missing_labels=bool(config.optional_columns),
        )
        load_rows = load_data if spans is None else load_spans
        return load_rows(sources, start.tokenizer, columns, max_length, config.cache, progress, scales)

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


def _load_pairs(
    sources: list[str],
    config: RewardTrainingConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    progress: bool,
) -> PairData:
    columns = ResponseColumns(
        config.response_columns, config.scores or None, config.prompt, config.weight, config.skip_empty
    )
    return load_pairs(sources, tokenizer, columns, max_length, config.cache, progress, config.max_pairs, config.seed)


def _describe(found: RunData[Config]) -> None:
    print(found.train.describe())
    if found.config.compares:
        return
    for name, scale in zip(found.config.attributes, found.train.scales, strict=True):
        print(scale.describe(name))


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
