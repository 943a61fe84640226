"""Data of a training run: the rows to train on and the rows to evaluate on."""

import warnings

from transformers import PreTrainedTokenizerBase

from radq.data.dataset import DataColumns, RewardData, load_data
from radq.errors import DataError
from radq.training.config import TrainingConfig
from radq.training.losses import LOSSES


def load_run_data(
    config: TrainingConfig, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None, progress: bool
) -> tuple[RewardData, RewardData | None]:
    """Load the data to train on and, if the settings ask for it, the data to evaluate on.

    Texts are cut to the smaller of `config.max_length` and `max_tokens`, the room that the model has.
    """
    max_length = min(config.max_length, max_tokens or config.max_length)
    columns = DataColumns(
        config.text, config.attributes, config.prompt, config.weight, config.label_range, config.skip_empty
    )

    def load(sources: list[str]) -> RewardData:
        return load_data(sources, tokenizer, columns, max_length, config.cache, progress)

    data = load(config.data)
    if progress:
        counts = data.counts
        print(f"{counts.rows} rows, {counts.tokens} tokens; {counts.truncated} cut off, {counts.empty} empty left out")
    eval_data = load(config.eval_data) if config.eval_data else None
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
    for attribute, low, high in zip(attributes, data.counts.label_low, data.counts.label_high, strict=True):
        if low == high:
            warnings.warn(f"label {attribute!r} is {low:g} in every row: there is nothing to learn.", stacklevel=2)
        if allowed is not None and not allowed[0] <= low <= high <= allowed[1]:
            raise DataError(
                f"the loss {loss!r} needs labels from {allowed[0]:g} to {allowed[1]:g}, but {attribute!r} runs from "
                f"{low:g} to {high:g}.",
                "map the labels with --label-range, or choose another --loss.",
            )
