"""Texts in which spans of characters have labels: from files to batches with a label for each token.

    columns = DataColumns(text="text", spans="praise")  # cells such as [[0, 8, 0], [13, 17, 1]]
    data = load_spans(["reviews.jsonl"], tokenizer, columns)
    data.batch([0, 5])["token_labels"]

A token has the label of the span with which it shares a character. Other tokens have the label of the whole text if
there is a column with such labels, and no loss otherwise. Axes: n rows, b batch, t time, s spans.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import RewardData
from radq.data.examples import NO_SPAN, SPAN_FOLDER, SPAN_NUMBERS, DataColumns
from radq.data.label_cells import LabelCells, join_cells
from radq.data.label_scale import LabelRules, LabelScale, find_scales, scale_labels
from radq.data.tokens import tokenise_columns
from radq.errors import DataError


class SpanData(RewardData):
    """Tokenised rows in a folder whose batches have `token_labels`, and a loss only at tokens with a label."""

    def __init__(
        self,
        folder: Path,
        columns: DataColumns,
        rules: LabelRules,
        scales: Sequence[LabelScale | None] | None = None,
    ):
        assert columns.spans is not None
        names, cells = [columns.spans], LabelCells.load(folder / SPAN_FOLDER)
        everything = join_cells([LabelCells.load(folder), cells]) if columns.labels else cells
        if not len(cells.rows):
            raise DataError(f"{columns.spans!r} holds no spans.", "give some texts spans as [[start, end, label], …].")
        scales = find_scales(everything, names, rules, scales)
        super().__init__(folder, columns.labels, rules, scales if columns.labels else [])
        self.scales = list(scales)
        self.span_labels = scale_labels(cells, names, self.scales)[:, 0]  # (s,)
        self.span_numbers = np.memmap(folder / SPAN_NUMBERS, np.int32, "r", shape=self.token_ids.shape)
        if not columns.labels:
            self.labels = np.full((len(self.weights), 1), np.nan, np.float32)  # (n, 1): whole texts have none

    @property
    def arrays(self) -> list[np.ndarray]:
        return [*super().arrays, self.span_numbers, self.span_labels]

    @property
    def label_limits(self) -> list[tuple[float, float]]:
        return [(float(np.nanmin(values)), float(np.nanmax(values))) for values in [self._all_labels]]

    @property
    def _all_labels(self) -> np.ndarray:
        return np.concatenate([self.span_labels, self.labels[:, 0]])

    @property
    def mean_labels(self) -> np.ndarray:
        """Mean label of all tokens that have one, (1,)."""
        return self.token_labels.mean(keepdims=True, dtype=np.float64)

    @property
    def token_labels(self) -> np.ndarray:
        """The labels of all tokens of these rows that have one, (tokens,)."""
        found = []
        for row in self.rows:
            numbers = self.span_numbers[self.offsets[row] + self.prompt_lengths[row] : self.offsets[row + 1]]
            labels = np.where(numbers == NO_SPAN, self.labels[row, 0], self.span_labels[numbers])
            found.append(labels[~np.isnan(labels)])
        return np.concatenate(found)

    def describe(self) -> str:
        """Say how many rows, tokens and spans were read."""
        marked = int((self.span_numbers != NO_SPAN).sum())
        return f"{super().describe()}; {len(self.span_labels)} spans on {marked} tokens"

    def cut_out(self, texts: np.ndarray) -> dict[str, np.ndarray]:
        found = super().cut_out(texts)
        columns = np.arange(found["input_ids"].shape[1])
        where = np.where(found["attention_mask"] > 0, self.offsets[texts][:, None] + columns, 0)
        numbers = self.span_numbers[where]  # (b, t)
        labels = np.where(numbers == NO_SPAN, self.labels[texts], self.span_labels[numbers])
        counted = (found["loss_mask"] > 0) & ~np.isnan(labels)
        token_labels = np.where(counted, labels, 0)[..., None].astype(np.float32)
        return found | {"loss_mask": counted.astype(np.int64), "token_labels": token_labels}


def load_spans(
    sources: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    columns: DataColumns,
    max_length: int = 512,
    cache_folder: str | Path | None = None,
    progress: bool = False,
    scales: Sequence[LabelScale | None] | None = None,
) -> SpanData:
    """Load texts with spans from files or hub data sets, as `load_data` loads texts with labels."""
    folder = tokenise_columns(sources, tokenizer, columns, max_length, cache_folder, progress)
    data = SpanData(folder, columns, columns.label_rules, scales)
    if not len(data.token_labels):
        raise DataError(
            f"no token has a label of {columns.spans!r}.", "check that spans count characters, and raise --max-length."
        )
    return data
