"""The reward matrix of a data set: rows are prefixes, columns tokens, and few entries are observed.

    R[x, v] = Σ λ y / Σ λ    over the utterances that continue the prefix x with the token v

Two things follow from a prefix tree. Sorted by what they begin with, utterances that share a prefix are neighbours, so
one sort per depth finds all rows of that depth. And an utterance that has left the others behind meets nobody again:
each of its further prefixes is a row with one entry, its own response, and needs no sorting. What is sorted is then
what utterances really share, a small part of the tokens.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from radq.data import RewardData
from radq.errors import DataError
from radq.files import whole_file

Array = np.ndarray


@dataclass(frozen=True)
class Observed:
    """The observed entries of a matrix, sorted by row; every row and column has one."""

    rows: Int[Array, " e"]
    columns: Int[Array, " e"]
    values: Float[Array, " e"]
    shape: tuple[int, int]

    @classmethod
    def of(cls, dense: Float[Array, "n m"]) -> "Observed":
        """Those of a matrix with NaN where nothing is known."""
        rows, columns = np.nonzero(~np.isnan(dense))
        return cls(rows, columns, dense[rows, columns].astype(np.float64), dense.shape)  # pyright: ignore

    def __len__(self) -> int:
        return len(self.values)

    def restrict(self, entries: Int[Array, " s"]) -> "Observed":
        """Only these entries, without the rows and columns that are empty then."""
        rows, row_of = np.unique(self.rows[entries], return_inverse=True)
        columns, column_of = np.unique(self.columns[entries], return_inverse=True)
        return Observed(row_of, column_of, self.values[entries], (len(rows), len(columns)))


@dataclass(frozen=True)
class RewardMatrix:
    """P_Ω(R) in compressed rows, with where each row's prefix is found: the first tokens of an utterance."""

    starts: Int[Array, " bounds"]  # row r has the entries starts[r] to starts[r + 1]
    tokens: Int[Array, " e"]
    values: Float[Array, " e"]
    prefix_utterance: Int[Array, " rows"]
    prefix_length: Int[Array, " rows"]
    vocab_size: int
    utterances: int
    ambiguous: int  # entries that average over several utterances
    contradicting: int  # and over different responses

    @property
    def prefixes(self) -> int:
        return len(self.starts) - 1

    @property
    def entries(self) -> int:
        return len(self.values)

    @cached_property
    def omega2(self) -> Observed:
        """The rows with two or more continuations, without the columns that are empty then."""
        sizes = np.diff(self.starts)
        rows = np.flatnonzero(sizes >= 2)
        where = _ranges(self.starts[rows], sizes[rows])
        tokens, columns = np.unique(self.tokens[where], return_inverse=True)
        return Observed(
            rows=np.repeat(np.arange(len(rows)), sizes[rows]),
            columns=columns.astype(np.int64),
            values=self.values[where],
            shape=(len(rows), len(tokens)),
        )

    def save(self, file: str | Path) -> None:
        """As npz; `scipy.sparse.load_npz` reads it as the matrix it is."""
        with whole_file(file) as temporary, temporary.open("wb") as stream:
            np.savez(
                stream,
                format=np.array("csr".encode("ascii")),
                shape=np.array([self.prefixes, self.vocab_size]),
                indptr=self.starts,
                indices=self.tokens,
                data=self.values,
                prefix_utterance=self.prefix_utterance,
                prefix_length=self.prefix_length,
                counts=np.array([self.utterances, self.ambiguous, self.contradicting]),
            )

    @classmethod
    def load(cls, file: str | Path) -> "RewardMatrix":
        try:
            with np.load(file, allow_pickle=False) as stored:
                utterances, ambiguous, contradicting = stored["counts"].tolist()
                return cls(
                    starts=stored["indptr"],
                    tokens=stored["indices"],
                    values=stored["data"],
                    prefix_utterance=stored["prefix_utterance"],
                    prefix_length=stored["prefix_length"],
                    vocab_size=int(stored["shape"][1]),
                    utterances=utterances,
                    ambiguous=ambiguous,
                    contradicting=contradicting,
                )
        except (OSError, ValueError, KeyError, EOFError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise DataError(
                f"{str(file)!r} cannot be read as a reward matrix: {reason}.",
                "`radq rank data --save-matrix` makes one.",
            ) from error


@dataclass
class _Part:
    """Rows of the matrix and their entries, one after the other."""

    row_sizes: Array
    prefix_utterance: Array
    prefix_length: Array
    tokens: Array
    values: Array
    ambiguous: int = 0
    contradicting: int = 0


def build_matrix(data: RewardData, vocab_size: int) -> RewardMatrix:
    """P_Ω(R) of tokenised data with one label. Prompts are context: rows may contain them, entries are the texts'."""
    utterances = _Utterances(data)
    active = np.flatnonzero(utterances.lengths > 0)
    nodes = np.zeros(len(active), np.int64)  # which prefix of the depth an utterance has; sorted
    parts, loners, departures, depth = [], [], [], 0
    while len(active):
        company = np.bincount(nodes)[nodes] > 1
        loners.append(active[~company])
        departures.append(np.full(len(loners[-1]), depth))
        active, nodes, part = _read_level(utterances, active[company], nodes[company], depth, vocab_size)
        parts.append(part)
        depth += 1
    parts.append(_read_tails(utterances, np.concatenate(loners), np.concatenate(departures)))
    return RewardMatrix(
        starts=np.concatenate([[0], np.cumsum(np.concatenate([part.row_sizes for part in parts]), dtype=np.int64)]),
        tokens=np.concatenate([part.tokens for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        prefix_utterance=np.concatenate([part.prefix_utterance for part in parts]),
        prefix_length=np.concatenate([part.prefix_length for part in parts]),
        vocab_size=vocab_size,
        utterances=len(data),
        ambiguous=sum(part.ambiguous for part in parts),
        contradicting=sum(part.contradicting for part in parts),
    )


class _Utterances:
    """What the matrix needs to know of the data. A position counts from the first token of prompt and text."""

    def __init__(self, data: RewardData):
        sizes = np.diff(data.offsets) - data.prompt_lengths
        counting = data.rows[(data.weights[data.rows] > 0) & (sizes[data.rows] > 0)]
        self.rows, self.tokens = counting, data.tokens
        self.starts = data.offsets[counting]
        self.lengths = data.offsets[counting + 1] - self.starts
        self.prompt_lengths = data.prompt_lengths[counting].astype(np.int64)
        self.responses = data.labels[counting, 0].astype(np.float64)
        texts = sizes[counting].astype(np.float64)
        self.scale = data.weights[counting] / (texts * (texts + 1) / 2)  # λ_t is this times t

    def weights(self, utterances: Array, position: int) -> Array:
        """λ of the token at a position; 0 where it belongs to the prompt."""
        return self.scale[utterances] * np.maximum(position + 1 - self.prompt_lengths[utterances], 0)


def _read_level(
    utterances: _Utterances, active: Array, nodes: Array, depth: int, vocab_size: int
) -> tuple[Array, Array, _Part]:
    """Rows of the prefixes of one length, and who goes on to the next."""
    keys = nodes * vocab_size + utterances.tokens[utterances.starts[active] + depth]
    order = np.argsort(keys, kind="stable")
    active, keys = active[order], keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))  # of the utterances that share an entry
    weights, responses = utterances.weights(active, depth), utterances.responses[active]
    seen = weights > 0
    sums, counts = _sum(weights, first), _sum(seen, first)
    known = counts > 0
    lowest = np.minimum.reduceat(np.where(seen, responses, np.inf), first) if len(first) else first
    highest = np.maximum.reduceat(np.where(seen, responses, -np.inf), first) if len(first) else first
    entry_nodes = (keys[first] // vocab_size)[known]
    row_starts = np.flatnonzero(np.diff(entry_nodes, prepend=-1))
    part = _Part(
        row_sizes=np.diff(np.append(row_starts, len(entry_nodes))),
        prefix_utterance=utterances.rows[active[first[known][row_starts]]].astype(np.int32),
        prefix_length=np.full(len(row_starts), depth, np.int32),
        tokens=(keys[first] % vocab_size)[known].astype(np.int32),
        values=_sum(weights * responses, first)[known] / sums[known],
        ambiguous=int((counts > 1).sum()),
        contradicting=int((known & (lowest < highest)).sum()),
    )
    children = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(keys))))
    going_on = utterances.lengths[active] > depth + 1
    return active[going_on], children[going_on], part


def _read_tails(utterances: _Utterances, loners: Array, departures: Array) -> _Part:
    """The rows of utterances that share no more: one entry each, their response."""
    begins = np.maximum(departures, utterances.prompt_lengths[loners])
    sizes = utterances.lengths[loners] - begins
    return _Part(
        row_sizes=np.ones(int(sizes.sum()), np.int32),
        prefix_utterance=np.repeat(utterances.rows[loners].astype(np.int32), sizes),
        prefix_length=_ranges(begins, sizes).astype(np.int32),
        tokens=utterances.tokens[_ranges(utterances.starts[loners] + begins, sizes)].astype(np.int32),
        values=np.repeat(utterances.responses[loners], sizes),
    )


def _sum(values: Array, first: Array) -> Array:
    """Over runs that begin at `first`."""
    return np.add.reduceat(values, first, dtype=np.float64) if len(first) else np.empty(0)


def _ranges(starts: Array, sizes: Array) -> Array:
    """start, start + 1, …, start + size - 1 of each pair, one after the other."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1] if len(ends) else 0)
