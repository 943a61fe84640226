"""Data of a training run: the rows to train on and the rows to evaluate on, with labels on one scale."""

import warnings
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from radq.data.dataset import DataColumns, RewardData, load_data
from radq.data.label_scale import KEPT, LabelScale, read_scale
from radq.errors import DataError, ModelError
from radq.models.config import RewardModelConfig
from radq.training.config import TrainingConfig
from radq.training.losses import LOSSES


def load_run_data(
    config: TrainingConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
    progress: bool,
    scales: Sequence[LabelScale | None] | None = None,
) -> tuple[RewardData, RewardData | None]:
    """Load the data to train on and, if the settings ask for it, the data to evaluate on.

    Texts are cut to the smaller of `config.max_length` and `max_tokens`, the room that the model has. Unless `scales`
    are known, the data to train on decide how labels become numbers, also those of the evaluation.
    """
    max_length = min(config.max_length, max_tokens or config.max_length)
    columns = DataColumns(
        config.text, config.attributes, config.prompt, config.weight, config.label_rules, config.skip_empty
    )

    def load(sources: list[str], scales: Sequence[LabelScale | None] | None) -> RewardData:
        return load_data(sources, tokenizer, columns, max_length, config.cache, progress, scales)

    data = load(config.data, scales)
    if progress:
        counts = data.counts
        print(f"{counts.rows} rows, {counts.tokens} tokens; {counts.truncated} cut off, {counts.empty} empty left out")
        for name, scale in zip(config.attributes, data.scales, strict=True):
            print(scale.describe(name))
    eval_data = load(config.eval_data, data.scales) if config.eval_data else None
    if eval_data is None and config.eval_share:
        data, eval_data = data.split(config.eval_share, config.seed)
    for part in (data, eval_data):
        if part is not None and not part.weights[part.rows].any():
            kind = "train" if part is data else "evaluate"
            raise DataError(f"{config.weight!r} is 0 in all rows to {kind} on.", "give some rows a weight above 0.")
    return data, eval_data


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
