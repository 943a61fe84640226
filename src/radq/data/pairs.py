"""Pairs of texts of which one is preferred: from files to batches.

    columns = ResponseColumns(texts=["chosen", "rejected"], prompt="prompt")
    data = load_pairs(["preferences.jsonl"], tokenizer, columns)
    data.batch([0, 5])["input_ids"]  # four texts: those of pair 0, then those of pair 5

A row of a table holds a preferred text and another one, or a list of responses with a list of scores. Two responses of
a row with different scores are a pair. Axes: p pairs, b pairs of a batch, n texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import RewardData
from radq.data.examples import Piece, column_weights, is_chat, read_chat, render_chats
from radq.data.label_scale import KEPT, NUMBER, LabelCells
from radq.data.tables import cell_text, check_columns, in_row, read_table
from radq.data.tokens import tokenise_rows
from radq.errors import DataError
from radq.settings import read_number

MAX_PAIRS = 10  # of a row: all pairs of five responses


class Responses(NamedTuple):
    """The responses of one row as texts, with the prompt before them and a score for each."""

    prompt: str
    texts: list[str]
    scores: list[float]


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

    def read(self, source: str | Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
        """Read and check the rows of a file or hub data set; an error names source, row and value."""
        names = [name for name in (*self.texts, self.scores, self.prompt, self.weight) if name is not None]
        for table in read_table(source):
            check_columns(source, table.columns, names)
            responses = []
            for number, row in zip(table.index, table[list(dict.fromkeys(names))].to_dict("records"), strict=True):
                with in_row(source, number):
                    found = self._read_responses(row, tokenizer)
                    problem = _find_problem(found)
                    if problem and not self.skip_empty:
                        raise DataError(f"{problem}.", "skip such rows with --skip-empty.")
                responses.append(Responses("", [], []) if problem else found)
            counts = np.array([len(row.texts) for row in responses], np.int64)  # 0 for a row that is left out
            scores = np.array([score for row in responses for score in row.scores], np.float64)[:, None]
            numbers = np.repeat(np.asarray(table.index, np.int64), counts)
            kinds = np.full(scores.shape, NUMBER, np.uint8)
            yield Piece(
                texts=[text for row in responses for text in row.texts],
                prompts=[row.prompt for row in responses for _ in row.texts],
                labels=LabelCells(kinds, scores, [[]], numbers, [(str(source), len(numbers))]),
                weights=np.repeat(column_weights(source, table, self.weight), counts),
                empty=int((counts == 0).sum()),
                compares=True,
            )

    def _read_responses(self, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Responses:
        if self.scores is None:
            values, scores = [row[name] for name in self.texts], [1.0, 0.0]
            names = list(self.texts)
        else:
            (name,) = self.texts
            values, scores = _read_list(row[name], name, "texts"), _read_scores(row[self.scores], self.scores)
            names = [name] * len(values)
            if len(values) != len(scores):
                raise DataError(
                    f"{name!r} has {len(values)} responses and {self.scores!r} has {len(scores)} scores.",
                    "give one score for each response.",
                )
        prompt = None if self.prompt is None else row[self.prompt]
        if values and any(map(is_chat, [prompt, *values])):
            chats = [read_chat(value, "assistant") for value in values]
            if not all(chats):
                return Responses("", ["" for _ in values], scores)
            context, texts = render_chats(tokenizer, read_chat(prompt, "user"), chats)
            return Responses(context, [text.rstrip() for text in texts], scores)
        texts = [cell_text(value, name) for value, name in zip(values, names, strict=True)]
        context = cell_text(prompt, self.prompt or "")
        repeats = all(text.startswith(context) for text in texts)
        return Responses(context, [text[len(context) :] for text in texts] if repeats else texts, scores)


def _read_list(value: Any, name: str, kind: str) -> list[Any]:
    if not isinstance(value, list | tuple | np.ndarray):
        raise DataError(f"{name!r} must be a list of {kind}, got {value!r}.", "write lists in jsonl or parquet files.")
    return list(value)


def _read_scores(value: Any, name: str) -> list[float]:
    scores = [read_number(item) for item in _read_list(value, name, "numbers")]
    if np.isnan(scores).any():
        raise DataError(f"{name!r} must be a list of finite numbers, got {value!r}.", "change or remove this row.")
    return scores


def _find_problem(responses: Responses) -> str:
    """Say why a row has no usable pair; an empty text if it has one."""
    texts, scores = responses.texts, responses.scores
    if not all(texts):
        return "a response is empty"
    if len(set(scores)) < 2:
        return "there are no two responses with different scores"
    if len(set(zip(texts, scores, strict=True))) > len(set(texts)):
        return f"two responses with different scores are equal, {max(texts, key=texts.count)[:40]!r}"
    return ""


class PairData(RewardData):
    """Tokenised pairs in a folder, as a data set of torch that returns whole batches.

    A row of this data set is a pair. In a batch, `input_ids` and the masks have two rows for each pair, the preferred
    text first, `texts` are the numbers of these texts, and `rows` and `weights` have one entry for each pair.
    """

    def __init__(self, folder: Path, max_pairs: int = MAX_PAIRS, seed: int = 0):
        super().__init__(folder, ["score"], scales=[KEPT])
        cells = LabelCells.load(folder)
        is_first = np.diff(cells.rows, prepend=-1) != 0  # (n,): of the texts of a row
        ends = np.cumsum([count for _, count in cells.sources])
        is_first[ends[ends < len(is_first)]] = True  # two sources may have rows of one number
        groups = np.cumsum(is_first) - 1
        self.pairs = find_pairs(groups, cells.values[:, 0], max_pairs, seed)  # (p, 2): numbers of texts
        self.groups = groups[self.pairs[:, 0]]  # (p,): the row of the table
        self.rows = np.arange(len(self.pairs))
        self.weights = self.weights[self.pairs[:, 0]]  # (p,)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of the longer text of each pair, prompt included."""
        return np.diff(self.offsets)[self.pairs[self.rows]].max(1)

    @property
    def arrays(self) -> list[np.ndarray]:
        return [*super().arrays, self.pairs]

    @property
    def units(self) -> np.ndarray:
        """The rows of the table, of which each has all of its pairs in one part."""
        return self.groups[self.rows]

    def describe(self) -> str:
        """Say how many pairs, texts and tokens were read."""
        counts = self.counts
        return (
            f"{len(self.pairs)} pairs of {counts.rows} texts, {counts.tokens} tokens; {counts.truncated} cut off, "
            f"{counts.empty} rows with empty or equal texts left out"
        )

    def read_rows(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        texts = self.pairs[rows].reshape(-1)  # (2b,)
        return {"texts": texts, **self.cut_out(texts)}


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
    """Load pairs from files or hub data sets, as `load_data` loads texts with labels.

    Of a row, at most `max_pairs` pairs are chosen at random by the seed.
    """
    return PairData(tokenise_rows(sources, tokenizer, columns, max_length, cache_folder, progress), max_pairs, seed)


def find_pairs(groups: np.ndarray, scores: np.ndarray, max_pairs: int, seed: int) -> np.ndarray:
    """Find all pairs of texts of one group with different scores, (p, 2), the higher score first.

    Args:
        groups: (n,): numbers of groups, rising.
        scores: (n,).
        max_pairs: largest number of pairs of a group, chosen at random.
    """
    _, starts, sizes = np.unique(groups, return_index=True, return_counts=True)
    parts = [np.empty((0, 2), np.int64)]
    for size in np.unique(sizes):
        members = starts[sizes == size][:, None] + np.arange(size)  # (groups of this size, size)
        higher = scores[members][:, :, None] > scores[members][:, None, :]
        group, better, worse = np.nonzero(higher)
        parts.append(np.stack([members[group, better], members[group, worse]], axis=1))
    pairs = np.concatenate(parts)
    pairs = pairs[np.random.default_rng(seed).permutation(len(pairs))]
    pairs = pairs[np.argsort(groups[pairs[:, 0]], kind="stable")]
    _, firsts, counts = np.unique(groups[pairs[:, 0]], return_index=True, return_counts=True)
    place = np.arange(len(pairs)) - np.repeat(firsts, counts)  # of a pair among those of its group
    kept = pairs[place < max_pairs]
    return kept[np.lexsort(kept.T[::-1])]
