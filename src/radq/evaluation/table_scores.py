"""Rewards of the texts in a table, and their agreement with labels.

    scores = score_table(model, "reviews.csv", DataColumns("text", ["praise"]), [None])
    scores.rewards  # (n, a): one row per row of the file; NaN where there is no text

The reward of a text is that of its last token, as in the evaluation of training. Axes: n rows, a attributes.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from tqdm import tqdm

from radq.data.dataset import RewardData, load_data
from radq.data.examples import DataColumns
from radq.data.label_scale import LabelScale
from radq.errors import DataError, ModelError, RewardValueError
from radq.models.reward import RewardModel
from radq.numerics import take_last


@dataclass(frozen=True)
class TableScores:
    """The rewards of the rows of a table that have a text."""

    rewards: Float[np.ndarray, "n a"]  # NaN where the tokenizer found no tokens
    labels: Float[np.ndarray, "n l"]  # NaN where a label is missing
    row_numbers: np.ndarray  # in the file, from 1
    scales: list[LabelScale]  # how labels became numbers, one per label column
    truncated: int  # number of texts that were cut off
    empty: int  # number of rows without a text

    def by_row(self, column: int) -> list[float | None]:
        """The rewards of one attribute for all rows of the file; None for those without a text."""
        values: list[float | None] = [None] * (len(self.row_numbers) + self.empty)
        for row, reward in zip(self.row_numbers.tolist(), self.rewards[:, column].tolist(), strict=True):
            values[row - 1] = None if reward != reward else reward
        return values


def score_table(
    model: RewardModel,
    source: str | Path,
    columns: DataColumns,
    scales: Sequence[LabelScale | None],
    max_length: int = 512,
    batch_size: int = 64,
    progress: bool = False,
) -> TableScores:
    """Score all texts of a file. `scales` say how its labels become numbers; None leaves this to the labels."""
    if model.tokenizer is None:
        raise ModelError("the reward model has no tokenizer.", "copy the tokenizer files of its backbone into it.")
    max_length = min(max_length, model.reader.context or max_length)
    with tempfile.TemporaryDirectory() as cache:
        data = load_data([source], model.tokenizer, columns, max_length, cache, progress, scales)
        with_tokens = data.labels[data.lengths > data.prompt_lengths]
        for name, labels in zip(columns.labels, with_tokens.T, strict=True):
            if np.isnan(labels).all():  # said before rewards are computed, which may take long
                raise DataError(f"{source}: no text has a label {name!r}.", "name other columns as labels, or none.")
        rewards = score_rows(model, data, batch_size, progress)
        if np.isnan(rewards).all():
            raise DataError(f"{source}: the tokenizer finds no tokens in these texts.", "check --text.")
        numbers, counts = np.array(data.row_numbers), data.counts
        return TableScores(rewards, data.labels, numbers, data.scales, counts.truncated, counts.empty)


@torch.no_grad()
def score_rows(
    model: RewardModel, data: RewardData, batch_size: int = 64, progress: bool = False
) -> Float[np.ndarray, "n a"]:
    """The rewards at the last token of each row; NaN for rows whose text has no tokens."""
    rewards = np.full((len(data), len(model.config.attributes)), np.nan)
    order = np.argsort(-data.lengths, kind="stable")  # the longest first: if memory is too small, this shows at once
    with tqdm(total=len(order), unit="text", desc="scoring", disable=not progress) as bar:
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            batch = {name: values.to(model.device) for name, values in data.batch(chosen.tolist()).items()}
            of_tokens = model.token_rewards(batch["input_ids"], batch["attention_mask"])  # (b, t, a)
            last = take_last(of_tokens, batch["loss_mask"]).double().cpu().numpy()
            has_text = batch["loss_mask"].any(1).cpu().numpy()
            rewards[chosen[has_text]] = last[has_text]
            if not np.isfinite(last).all():
                row = data.row_numbers[data.rows[chosen[~np.isfinite(last).all(1)][0]]]
                raise RewardValueError(
                    f"the reward of row {row} is not finite.", "train the reward model again, with a lower rate."
                )
            bar.update(len(chosen))
    return rewards
