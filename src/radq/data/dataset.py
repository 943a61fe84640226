"""Tokenised texts with labels, of whole texts or of spans of characters: from files to batches.

    data = load_data(["reviews.csv.gz"], tokenizer, DataColumns(text="text", labels=["praise"]))
    data.batch([0, 5, 7])["input_ids"]

Rows (`radq.data.examples`) are tokenised once and kept on disk (`radq.data.tokens`). The token ids of all rows are one
flat memory-mapped array, so that millions of rows take no memory. A batch is cut out of it with array operations.
Axes: n rows, b batch, t time, a attributes, s spans.
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from radq.data.examples import NO_SPAN, SPAN_FOLDER, SPAN_NUMBERS, DataColumns
from radq.data.label_scale import LabelCells, LabelRules, LabelScale, find_scales, join_cells, scale_labels
from radq.data.tokens import COUNTS, Counts, tokenise_rows
from radq.errors import DataError
from radq.files import fingerprint_arrays

NO_LIMIT = 2**31  # more tokens than any text has
# Tensors of a batch with a column for each token.
OF_TOKENS = ("input_ids", "attention_mask", "loss_mask", "targets", "token_labels", "states")


class RewardData(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Tokenised rows in a folder, as a data set of torch that returns whole batches (see `__getitems__`).

    Labels are stored as they stand in the files, and become numbers by `scales`, one per name in `label_names`. Without
    `scales`, `rules` and the labels themselves decide about them.
    """

    def __init__(
        self,
        folder: Path,
        label_names: Sequence[str] = (),
        rules: LabelRules | None = None,
        scales: Sequence[LabelScale | None] | None = None,
    ):
        self.folder = folder
        try:
            stored = json.loads((folder / COUNTS).read_text())
            self.counts = Counts(**stored["counts"])
            self.offsets = np.load(folder / "offsets.npy", mmap_mode="r")
            num_tokens = (self.offsets[-1],)
            self.token_ids = np.memmap(folder / "tokens.bin", dtype=stored["dtype"], mode="r", shape=num_tokens)
            self.prompt_lengths = np.load(folder / "prompt_lengths.npy", mmap_mode="r")
            self.weights = np.load(folder / "weights.npy", mmap_mode="r")
            cells = LabelCells.load(folder)
        except (EOFError, KeyError, TypeError, ValueError, OSError) as error:
            raise DataError(
                f"the tokenised data in {str(folder)!r} is damaged: {error}.",
                "delete that folder; radq makes it again.",
            ) from error
        self.rows = np.arange(len(self.weights))
        self.row_numbers = cells.rows  # (n,): those of the file that a row comes from
        self.scales = find_scales(cells, label_names, rules or LabelRules(), scales)
        self.labels = scale_labels(cells, label_names, self.scales)  # (n, a), NaN where a label is missing
        # readers of numbers of tokens of some texts, (b, t, n), that were computed before: `targets` and `states`
        self.stored: dict[str, Callable[[np.ndarray], np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batch([index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return self.batch(indices)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, prompt included."""
        return np.diff(self.offsets)[self.rows]

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the token ids, labels and weights, and of the choice of rows."""
        return fingerprint_arrays(self.arrays)

    @property
    def arrays(self) -> list[np.ndarray]:
        """All arrays that the batches depend on."""
        return [self.token_ids, self.offsets, self.prompt_lengths, self.labels, self.weights, self.rows]

    @property
    def label_ranges(self) -> list[tuple[float, float]]:
        """Range of the labels of each attribute: (0, 1) if it holds them all, else their lowest and highest value."""
        return [(0.0, 1.0) if low >= 0 and high <= 1 else (low, high) for low, high in self.label_limits]

    @property
    def label_limits(self) -> list[tuple[float, float]]:
        """The lowest and the highest label of each attribute."""
        return list(zip(np.nanmin(self.labels, 0).tolist(), np.nanmax(self.labels, 0).tolist(), strict=True))

    @property
    def mean_labels(self) -> np.ndarray:
        """Weighted mean of the labels of each attribute, (a,): the constant that fits these rows best."""
        labels = self.labels[self.rows].astype(np.float64)
        weights = self.weights[self.rows][:, None] * ~np.isnan(labels)
        return np.nansum(labels * weights, axis=0) / weights.sum(0, dtype=np.float64)

    def split(self, share: float, seed: int) -> tuple["RewardData", "RewardData"]:
        """Split the rows at random into two parts, of which the second has this share of them.

        One row at least is in each part, and rows that belong together are in the same one.
        """
        units = np.random.default_rng(seed).permutation(np.unique(self.units))
        cut = max(1, round(len(units) * share))
        if cut >= len(units):
            raise DataError(
                f"a share of {share:g} of {len(units)} row{'s' * (len(units) > 1)} leaves none to train on.",
                "lower --eval-share, or give --eval-data.",
            )
        held_out = np.isin(self.units, units[:cut])
        return self.where(~held_out), self.where(held_out)

    @property
    def units(self) -> np.ndarray:
        """A number for each row, (n,), which rows share that belong together."""
        return self.rows

    def where(self, chosen: np.ndarray) -> "RewardData":
        """The part of the rows for which `chosen`, (n,), is true."""
        return self._changed(rows=self.rows[chosen])

    def with_labels(self, labels: np.ndarray) -> "RewardData":
        """The same rows with other labels, such as the scores of a classifier: (n, a), for all rows of the files."""
        return self._changed(labels=labels)

    def _changed(self, **attributes: np.ndarray) -> "RewardData":
        changed = copy.copy(self)
        changed.__dict__.pop("fingerprint", None)
        changed.__dict__.update(attributes)
        return changed

    def describe(self) -> str:
        """Say how many rows and tokens were read."""
        counts = self.counts
        return f"{counts.rows} rows, {counts.tokens} tokens; {counts.truncated} cut off, {counts.empty} empty left out"

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Batch of rows, padded on the right; without any rows, a batch of one row of padding with weight 0."""
        if not len(indices):  # a process that has no rows left still takes part in the step
            empty = {name: torch.zeros_like(values) for name, values in self.batch([0]).items()}
            return {name: values[:, :1] if name in OF_TOKENS else values for name, values in empty.items()}
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        batch = {"rows": rows, **self.read_rows(rows), "weights": self.weights[rows]}
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in batch.items()}

    def read_rows(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The texts and the labels of these rows of the files."""
        return {**self.cut_out(rows), "labels": self.labels[rows]}

    def find_tokens(self, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whether each column of each text holds a token, and its position in the arrays of all tokens, both (b, t)."""
        lengths = self.offsets[texts + 1] - self.offsets[texts]
        columns = np.arange(max(1, lengths.max(initial=1)))
        is_token = columns < lengths[:, None]
        return is_token, np.where(is_token, self.offsets[texts][:, None] + columns, 0)

    def cut_out(self, texts: np.ndarray) -> dict[str, np.ndarray]:
        """Tokens, masks and what is stored of the texts with these numbers, each with a column for each token."""
        is_token, positions = self.find_tokens(texts)
        is_answer = np.arange(is_token.shape[1]) >= self.prompt_lengths[texts][:, None]
        parts: dict[str, np.ndarray] = {
            "input_ids": np.where(is_token, self.token_ids[positions].astype(np.int64), 0),
            "attention_mask": is_token.astype(np.int64),
            "loss_mask": (is_token & is_answer).astype(np.int64),
        }
        return parts | {name: read(texts) for name, read in self.stored.items()}


class SpanData(RewardData):
    """Tokenised rows in a folder whose batches have `token_labels`, and a loss only at tokens with a label.

    A token has the label of the span with which it shares a character. Other tokens have the label of the whole text if
    there is a column with such labels, and no loss otherwise.
    """

    def __init__(self, folder: Path, columns: DataColumns, scales: Sequence[LabelScale | None] | None = None):
        assert columns.spans is not None
        names, cells = [columns.spans], LabelCells.load(folder / SPAN_FOLDER)
        everything = join_cells([LabelCells.load(folder), cells]) if columns.labels else cells
        if not len(cells.rows):
            raise DataError(f"{columns.spans!r} holds no spans.", "give some texts spans as [[start, end, label], …].")
        scales = find_scales(everything, names, columns.label_rules, scales)
        super().__init__(folder, columns.labels, columns.label_rules, scales if columns.labels else [])
        self.scales = list(scales)
        self.span_labels = scale_labels(cells, names, self.scales)[:, 0]  # (s,)
        self.span_numbers = np.memmap(folder / SPAN_NUMBERS, np.int32, "r", shape=self.token_ids.shape)
        if not columns.labels:
            self.labels = np.full((len(self.weights), 1), np.nan, np.float32)  # (n, 1): whole texts have none
        if not len(self.token_labels):
            raise DataError(
                f"no token has a label of {columns.spans!r}.",
                "check that spans count characters, and raise --max-length.",
            )

    @property
    def arrays(self) -> list[np.ndarray]:
        return [*super().arrays, self.span_numbers, self.span_labels]

    @property
    def label_limits(self) -> list[tuple[float, float]]:
        labels = np.concatenate([self.span_labels, self.labels[:, 0]])
        return [(float(np.nanmin(labels)), float(np.nanmax(labels)))]

    @property
    def mean_labels(self) -> np.ndarray:
        """Mean label of all tokens that have one, (1,)."""
        return self.token_labels.mean(keepdims=True, dtype=np.float64)

    @property
    def token_labels(self) -> np.ndarray:
        """The labels of all tokens of these rows that have one, (tokens,)."""
        parts = []
        for row in self.rows:
            numbers = self.span_numbers[self.offsets[row] + self.prompt_lengths[row] : self.offsets[row + 1]]
            labels = np.where(numbers == NO_SPAN, self.labels[row, 0], self.span_labels[numbers])
            parts.append(labels[~np.isnan(labels)])
        return np.concatenate(parts)

    def describe(self) -> str:
        """Say how many rows, tokens and spans were read."""
        marked = int((self.span_numbers != NO_SPAN).sum())
        return f"{super().describe()}; {len(self.span_labels)} spans on {marked} tokens"

    def cut_out(self, texts: np.ndarray) -> dict[str, np.ndarray]:
        parts = super().cut_out(texts)
        numbers = self.span_numbers[self.find_tokens(texts)[1]]  # (b, t)
        labels = np.where(numbers == NO_SPAN, self.labels[texts], self.span_labels[numbers])
        counted = (parts["loss_mask"] > 0) & ~np.isnan(labels)
        token_labels = np.where(counted, labels, 0)[..., None].astype(np.float32)
        return parts | {"loss_mask": counted.astype(np.int64), "token_labels": token_labels}


def pad_batch(batch: dict[str, Tensor], num_rows: int, length: int) -> dict[str, Tensor]:
    """Add rows of padding with weight 0 up to `num_rows`, and columns of padding up to `length`; no loss counts them.

    The numbers of the added rows are −1. If a row consists of several texts, as a pair does, so does an added one.
    """
    b, t = len(batch["rows"]), batch["input_ids"].shape[1]
    if (b, t) == (num_rows, length):
        return batch

    def pad(name: str, values: Tensor) -> Tensor:
        columns = length - t if name in OF_TOKENS else 0
        added = (num_rows - b) * len(values) // b
        amounts = [0, 0] * (values.dim() - 2) + [0, columns] * (values.dim() > 1) + [0, added]  # last axis first
        return F.pad(values, amounts, value=-1 if name == "rows" else 0)

    return {name: pad(name, values) for name, values in batch.items()}


def load_data(
    sources: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    columns: DataColumns,
    max_length: int = 512,
    cache_folder: str | Path | None = None,
    progress: bool = False,
    scales: Sequence[LabelScale | None] | None = None,
) -> RewardData:
    """Load files or hub data sets, tokenised now or by an earlier call.

    Args:
        max_length: longer texts are cut off.
        cache_folder: folder for tokenised data; by default a folder in the user's cache.
        scales: how the labels of each column become numbers, as earlier data have decided; None decides by this data.
    """
    folder = tokenise_rows(sources, tokenizer, columns, max_length, cache_folder, progress)
    if columns.spans is not None:
        return SpanData(folder, columns, scales)
    return RewardData(folder, columns.labels, columns.label_rules, scales)


class GlobalBatches(torch.utils.data.Sampler[list[int]]):
    """Distributes the rows of an epoch over processes, in batches of rows of similar length and in random order.

    An epoch is a list of global batches that depends on seed and epoch alone. Each is cut into `num_micro_batches` ×
    `world_size` parts, so that the rows of an optimizer step do not depend on these two numbers. Parts differ by a row
    at most, and may be empty at the end of an epoch.
    """

    POOL = 50  # the batches that are sorted by length together, for less padding; their order stays random

    def __init__(
        self,
        lengths: np.ndarray,
        batch_size: int,
        num_micro_batches: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ):
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.num_micro_batches, self.rank, self.world_size = num_micro_batches, rank, world_size
        self.epoch = 0

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size) * self.num_micro_batches

    @property
    def rows_at_once(self) -> int:
        """The rows of the largest part."""
        return -(-self.batch_size // (self.num_micro_batches * self.world_size))

    def plan(self) -> list[np.ndarray]:
        """Global batches of the epoch, as indices of rows."""
        rng = np.random.default_rng([self.seed, self.epoch])
        order = rng.permutation(len(self.lengths))
        pool = self.POOL * self.batch_size
        for first in range(0, len(order), pool):
            part = order[first : first + pool]
            order[first : first + pool] = part[np.argsort(self.lengths[part], kind="stable")]
        batches = [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        return [batches[index] for index in rng.permutation(len(batches))]

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.plan():
            parts = np.array_split(batch, self.num_micro_batches * self.world_size)
            for micro_batch in range(self.num_micro_batches):
                yield parts[micro_batch * self.world_size + self.rank].tolist()
