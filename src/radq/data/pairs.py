"""Pairs of texts of which one is preferred: from files to batches.

    columns = ResponseColumns(texts=["chosen", "rejected"], prompt="prompt")
    data = load_pairs(["preferences.jsonl"], tokenizer, columns)
    data.batch([0, 5])["input_ids"]  # four texts: those of pair 0, then those of pair 5

A row of a table holds a preferred text and another one, or a list of responses with a list of scores. Two responses of
a row with different scores are a pair. Axes: p pairs, b pairs of a batch, n texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, zeros_like
from transformers import PreTrainedTokenizerBase

from radq.data.chats import is_chat, read_chat, render_chats
from radq.data.dataset import RewardData, hold_out, to_tensors
from radq.data.examples import Piece, column_weights
from radq.data.label_cells import NUMBER, LabelCells
from radq.data.label_scale import KEPT
from radq.data.tables import Table, cell_text, check_columns, read_table
from radq.data.tokens import tokenise_once
from radq.errors import DataError

MAX_PAIRS = 10  # of a row: all pairs of five responses


@dataclass(frozen=True)
class ResponseColumns:
    """Names of the columns of a table with responses, and how to read them.

    Args:
        texts: column with the preferred texts, then the column with the others; or one column with lists of responses.
        scores: column with lists of numbers, one for each response, if there is one column of responses.
        prompt: column with a context that stands before each response; responses may repeat it.
        weight: column with the weight of each row, at least 0.
        skip_empty: skip and count rows without a usable pair; by default such a row is an error.
    """

    texts: Sequence[str]
    scores: str | None = None
    prompt: str | None = None
    weight: str | None = None
    skip_empty: bool = False

    @property
    def names(self) -> list[str]:
        """Names of all columns that are read."""
        return [name for name in (*self.texts, self.scores, self.prompt, self.weight) if name is not None]


class PairData(RewardData):
    """Tokenised pairs in a folder, as a data set of torch that returns whole batches.

    A row of this data set is a pair. In a batch, `input_ids` and the masks have two rows for each pair, the preferred
    text first, `texts` are the numbers of these texts, and `rows` and `weights` have one entry for each pair.
    """

    def __init__(self, folder: Path, max_pairs: int = MAX_PAIRS, seed: int = 0):
        super().__init__(folder, ["score"], scales=[KEPT])
        cells = LabelCells.load(folder)
        self.pairs = find_pairs(cells.groups, cells.values[:, 0], max_pairs, seed)  # (p, 2): numbers of texts
        self.groups = cells.groups[self.pairs[:, 0]]  # (p,): the row of the table
        self.rows = np.arange(len(self.pairs))
        self.weights = self.weights[self.pairs[:, 0]]  # (p,)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of the longer text of each pair, prompt included."""
        return np.diff(self.offsets)[self.pairs[self.rows]].max(1)

    @property
    def arrays(self) -> list[np.ndarray]:
        return [*super().arrays, self.pairs]

    def split(self, share: float, seed: int) -> "tuple[PairData, PairData]":
        """Split the rows of the table at random into two parts; all pairs of a row go into one of them."""
        groups = self.groups[self.rows]
        held_out = np.isin(groups, hold_out(np.unique(groups), share, seed))
        train: Any = self.where(~held_out)
        evaluation: Any = self.where(held_out)
        return train, evaluation

    def describe(self) -> str:
        """Say how many pairs, texts and tokens were read."""
        counts = self.counts
        return (
            f"{len(self.pairs)} pairs of {counts.rows} texts, {counts.tokens} tokens; {counts.truncated} cut off, "
            f"{counts.empty} rows with empty or equal texts left out"
        )

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Batch of pairs, padded on the right; without any pairs, a batch of one pair of padding with weight 0."""
        if not len(indices):
            return {name: zeros_like(values) for name, values in self.batch([0]).items()}
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        texts = self.pairs[rows].reshape(-1)  # (2b,)
        return to_tensors({"rows": rows, "texts": texts, **self.cut_out(texts), "weights": self.weights[rows]})


def load_pairs(
    sources: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    columns: ResponseColumns,
    max_length: int = 512,
    cache_folder: str | Path | None = None,
    progress: bool = False,
    max_pairs: int = MAX_PAIRS,
    seed: int = 0,
) -> PairData:
    """Load pairs from files or hub data sets, tokenised now or by an earlier call.

    Args:
        max_length: longer responses are cut off, and longer prompts lose their beginning.
        cache_folder: folder for tokenised data; by default a folder in the user's cache.
        max_pairs: largest number of pairs of one row, chosen at random by the seed.
    """

    def read(source: str | Path) -> Iterator[Piece]:
        return read_responses(source, columns, tokenizer)

    settings = asdict(columns) | {"chat_template": tokenizer.chat_template}
    folder = tokenise_once(sources, tokenizer, read, settings, max_length, cache_folder, progress)
    return PairData(folder, max_pairs, seed)


def find_pairs(groups: np.ndarray, scores: np.ndarray, max_pairs: int, seed: int) -> np.ndarray:
    """Find all pairs of texts of one group with different scores, (p, 2), the higher score first.

    Args:
        groups: (n,): numbers of groups, rising.
        scores: (n,).
        max_pairs: largest number of pairs of a group, chosen at random.
    """
    _, starts, sizes = np.unique(groups, return_index=True, return_counts=True)
    found = [np.empty((0, 2), np.int64)]
    for size in np.unique(sizes):
        members = starts[sizes == size][:, None] + np.arange(size)  # (groups of this size, size)
        higher = scores[members][:, :, None] > scores[members][:, None, :]
        group, better, worse = np.nonzero(higher)
        found.append(np.stack([members[group, better], members[group, worse]], axis=1))
    pairs = np.concatenate(found)
    pairs = pairs[np.random.default_rng(seed).permutation(len(pairs))]
    pairs = pairs[np.argsort(groups[pairs[:, 0]], kind="stable")]
    _, firsts, counts = np.unique(groups[pairs[:, 0]], return_index=True, return_counts=True)
    place = np.arange(len(pairs)) - np.repeat(firsts, counts)  # of a pair among those of its group
    kept = pairs[place < max_pairs]
    return kept[np.lexsort(kept.T[::-1])]


# --- rows ---


class Responses(NamedTuple):
    """The responses of one row as texts, with the prompt before them and a score for each."""

    prompt: str
    texts: list[str]
    scores: list[float]


def read_responses(source: str | Path, columns: ResponseColumns, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Read and check the rows of a file or hub data set; an error names source, row and value."""
    first_row = 1
    for table in read_table(source):
        check_columns(source, table, columns.names)
        table.index = np.arange(first_row, first_row + len(table))  # row numbers, for errors
        first_row += len(table)
        weights = column_weights(source, table, columns.weight)
        found = list(_read_rows(source, table, columns, tokenizer))
        numbers = np.array([len(row.texts) for row in found], np.int64)  # 0 for a row that is left out
        scores = np.array([score for row in found for score in row.scores], np.float64)[:, None]
        rows = np.repeat(np.asarray(table.index, np.int64), numbers)
        yield Piece(
            texts=[text for row in found for text in row.texts],
            prompts=[row.prompt for row in found for _ in row.texts],
            labels=LabelCells(np.full(scores.shape, NUMBER, np.uint8), scores, [[]], rows, [(str(source), len(rows))]),
            weights=np.repeat(weights, numbers),
            empty=int((numbers == 0).sum()),
            compares=True,
        )


def _read_rows(
    source: str | Path, table: Table, columns: ResponseColumns, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Responses]:
    """Read the responses of each row, none of a row that is left out."""
    for place, row in zip(table.index, table[list(dict.fromkeys(columns.names))].to_dict("records"), strict=True):
        try:
            found = _read_row(row, columns, tokenizer)
            problem = _find_problem(found)
        except DataError as error:
            raise DataError(f"{source}, row {place}: {error.message}", error.hint) from error
        if problem and not columns.skip_empty:
            raise DataError(f"{source}, row {place}: {problem}.", "skip such rows with --skip-empty.")
        yield Responses("", [], []) if problem else found


def _read_row(row: dict[str, Any], columns: ResponseColumns, tokenizer: PreTrainedTokenizerBase) -> Responses:
    if columns.scores is None:
        values, scores = [row[name] for name in columns.texts], [1.0, 0.0]
        names = list(columns.texts)
    else:
        (name,) = columns.texts
        values, scores = _read_list(row[name], name, "texts"), _read_scores(row[columns.scores], columns.scores)
        names = [name] * len(values)
        if len(values) != len(scores):
            raise DataError(
                f"{name!r} has {len(values)} responses and {columns.scores!r} has {len(scores)} scores.",
                "give one score for each response.",
            )
    prompt = None if columns.prompt is None else row[columns.prompt]
    if values and any(map(is_chat, [prompt, *values])):
        chats = [read_chat(value, "assistant") for value in values]
        if not all(chats):
            return Responses("", ["" for _ in values], scores)
        context, texts = render_chats(tokenizer, read_chat(prompt, "user"), chats)
        return Responses(context, [text.rstrip() for text in texts], scores)
    texts = [cell_text(value, name) for value, name in zip(values, names, strict=True)]
    context = "" if columns.prompt is None else cell_text(prompt, columns.prompt)
    repeats = all(text.startswith(context) for text in texts)
    return Responses(context, [text[len(context) :] for text in texts] if repeats else texts, scores)


def _read_list(value: Any, name: str, kind: str) -> list[Any]:
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"{name!r} must be a list of {kind}, got {value!r}.", "write lists in jsonl or parquet files.")
    return list(value)


def _read_scores(value: Any, name: str) -> list[float]:
    items = _read_list(value, name, "numbers")
    try:
        scores = [float(item) for item in items]
    except (OverflowError, TypeError, ValueError):
        scores = [np.nan]
    if not np.isfinite(scores).all():
        raise DataError(f"{name!r} must be a list of finite numbers, got {value!r}.", "change or remove this row.")
    return scores


def _find_problem(found: Responses) -> str:
    """Say why a row has no usable pair; an empty text if it has one."""
    if not all(found.texts):
        return "a response is empty"
    if len(set(found.scores)) < 2:
        return "there are no two responses with different scores"
    if len(set(zip(found.texts, found.scores, strict=True))) > len(set(found.texts)):
        return f"two responses with different scores are equal, {max(found.texts, key=found.texts.count)[:40]!r}"
    return ""
