"""The reward matrix of a data set: its rows are prefixes, its columns are tokens, and few of its entries are observed.

    R[x, v] = Σ λ y / Σ λ    over the utterances with label y that continue the prefix x with the token v

Several attributes share the hidden state h(x) of a prefix, so they share one stacked matrix [R_1 … R_a], whose columns
are all tokens of the first attribute, then all tokens of the second, and so on. Ω is the set of observed entries, Ω_2
the set of those in rows with two or more continuations.

The matrix is built depth by depth. One sort per depth, by the prefix and the token after it, finds all entries of that
depth. An utterance that no longer shares its prefix with any other is set aside:
each of its further prefixes is a row with one entry, its own label, and needs no sorting. So only the shared beginnings
are sorted, which are a small part of all tokens.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from radq.data.dataset import RewardData
from radq.errors import DataError, first_line
from radq.files import atomic_file
from radq.models.vocabulary import Vocabulary

Array = np.ndarray
UNNAMED = "label"  # an attribute whose name is not known


@dataclass(frozen=True)
class Observed:
    """The observed entries of a matrix, sorted by row; every row and every column has at least one."""

    rows: Int[Array, " e"]
    columns: Int[Array, " e"]
    values: Float[Array, " e"]
    shape: tuple[int, int]

    @classmethod
    def of(cls, dense: Float[Array, "n m"]) -> "Observed":
        """The entries of a dense matrix that are not NaN."""
        rows, columns = np.nonzero(~np.isnan(dense))
        return cls(rows, columns, dense[rows, columns].astype(np.float64), dense.shape)  # pyright: ignore

    def __len__(self) -> int:
        return len(self.values)

    @property
    def sides(self) -> tuple[Int[Array, " e"], Int[Array, " e"]]:
        return self.rows, self.columns


@dataclass(frozen=True)
class RewardMatrix:
    """P_Ω([R_1 … R_a]) in compressed rows.

    A row holds the entries of the first attribute, then those of the second, and so on, each with the same tokens in
    the same order. Its prefix is the first `prefix_length` tokens of the utterance `prefix_utterance`. Fields that may
    be None are None in files that an earlier version has saved.
    """

    starts: Int[Array, " bounds"]  # row r has the entries starts[r] to starts[r + 1]
    columns: Int[Array, " e"]  # attribute · vocab_size + token
    values: Float[Array, " e"]
    prefix_utterance: Int[Array, " rows"]
    prefix_length: Int[Array, " rows"]
    vocab_size: int
    utterances: int
    ambiguous: int  # entries that are the mean over several utterances
    contradicting: int  # entries that are the mean over different labels
    attributes: tuple[str, ...] = (UNNAMED,)
    weights: Float[Array, " e"] | None = None  # Λ of each entry: the sum of λ times the weight of the utterance
    contradictions: Float[Array, " a"] | None = None  # Σ λ (y − R)² over all utterances and their tokens
    omega2_prefixes: Int[Array, " p"] | None = None  # tokens of the prefixes of Ω_2, one after the other
    shuffled: Float[Array, " s"] | None = None  # values of Ω_2 when the labels of the utterances are shuffled
    vocabulary: Vocabulary | None = None  # the tokens that the ids stand for

    @property
    def prefixes(self) -> int:
        return len(self.starts) - 1

    @property
    def entries(self) -> int:
        return len(self.values)

    @property
    def tokens(self) -> Int[Array, " e"]:
        return self.columns % self.vocab_size if len(self.attributes) > 1 else self.columns

    @cached_property
    def omega2_rows(self) -> Int[Array, " n"]:
        """Indices of the rows with two or more continuations."""
        return np.flatnonzero(np.diff(self.starts) >= 2 * len(self.attributes))

    @cached_property
    def omega2(self) -> Observed:
        """The entries in rows with two or more continuations, without empty columns."""
        sizes = np.diff(self.starts)[self.omega2_rows]
        where = concatenate_ranges(self.starts[self.omega2_rows], sizes)
        used, columns = np.unique(self.columns[where], return_inverse=True)
        return Observed(
            rows=np.repeat(np.arange(len(sizes)), sizes),
            columns=columns.astype(np.int64),
            values=self.values[where],
            shape=(len(sizes), len(used)),
        )

    @property
    def shuffled_omega2(self) -> Observed | None:
        """Ω_2 with shuffled labels; None in files of earlier versions."""
        return None if self.shuffled is None else replace(self.omega2, values=self.shuffled)

    def omega2_prefix(self, row: int) -> list[int]:
        """The tokens of the prefix that belongs to a row of Ω_2."""
        if self.omega2_prefixes is None:
            raise DataError(
                "the reward matrix does not hold the tokens of its prefixes: an earlier version of radq saved it.",
                "make it again from the data with `radq rank data FILE --save-matrix FILE`.",
            )
        ends = np.cumsum(self.prefix_length[self.omega2_rows], dtype=np.int64)
        end, length = int(ends[row]), int(self.prefix_length[self.omega2_rows[row]])
        return self.omega2_prefixes[end - length : end].tolist()

    def save(self, file: str | Path) -> None:
        """Write an npz file, which `scipy.sparse.load_npz` reads as a sparse matrix."""
        arrays = {name: getattr(self, name) for name in (*REQUIRED_PARTS, *OPTIONAL_PARTS)}
        parts: dict[str, Any] = {STORED.get(name, name): part for name, part in arrays.items() if part is not None} | {
            "format": np.array(b"csr"),
            "shape": np.array([self.prefixes, len(self.attributes) * self.vocab_size]),
            "counts": np.array([self.utterances, self.ambiguous, self.contradicting]),
            "attributes": np.array(self.attributes),
        }
        if self.vocabulary is not None and self.vocabulary.fingerprint is not None:
            parts["vocabulary"] = np.array([str(self.vocabulary.num_tokens), self.vocabulary.fingerprint])
        with atomic_file(file) as temporary, temporary.open("wb") as stream:
            np.savez(stream, **parts)

    @classmethod
    def load(cls, file: str | Path) -> "RewardMatrix":
        try:
            with Path(file).open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
                matrix = cls._from_parts(dict(stored))
            matrix._check_parts()
        except (OSError, ValueError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)
            raise DataError(
                f"{str(file)!r} cannot be read as a reward matrix: {reason.rstrip('.')}.",
                "give a file that `radq rank data --save-matrix FILE` has written.",
            ) from error
        return matrix

    @classmethod
    def _from_parts(cls, parts: dict[str, Array]) -> "RewardMatrix":
        counts = dict(zip(("utterances", "ambiguous", "contradicting"), parts["counts"].tolist(), strict=True))
        attributes = tuple(parts["attributes"].tolist()) if "attributes" in parts else (UNNAMED,)
        vocab_size = int(parts["shape"][1]) // len(attributes)
        find, vocabulary = parts.get, None
        if "vocabulary" in parts:  # the file has all parts
            find = parts.__getitem__
            num_tokens, fingerprint = parts["vocabulary"].tolist()
            vocabulary = Vocabulary(vocab_size, int(num_tokens), fingerprint)
        arrays: dict[str, Any] = {name: parts[STORED.get(name, name)] for name in REQUIRED_PARTS}
        arrays |= {name: find(name) for name in OPTIONAL_PARTS}
        return cls(**arrays, **counts, vocab_size=vocab_size, attributes=attributes, vocabulary=vocabulary)

    def _check_parts(self) -> None:
        """Raise ValueError if parts of a file do not fit each other."""
        starts, n, a = self.starts, self.prefixes, len(self.attributes)
        sizes = np.diff(starts)
        if n < 1 or starts[0] != 0 or starts[-1] != self.entries or (sizes < a).any() or (sizes % a).any():
            raise ValueError("its rows do not fit its entries")
        if len(self.columns) != self.entries or self.columns.min() < 0 or self.columns.max() >= a * self.vocab_size:
            raise ValueError("its columns do not fit its shape")
        if len(self.prefix_length) != n or len(self.prefix_utterance) != n:
            raise ValueError("its prefixes do not fit its rows")
        if not np.isfinite(self.values).all():
            raise ValueError("a value is not finite")
        wanted = {
            "weights": self.entries,
            "contradictions": a,
            "omega2_prefixes": int(self.prefix_length[self.omega2_rows].sum()),
            "shuffled": int(sizes[self.omega2_rows].sum()),
        }
        for name, size in wanted.items():
            part = getattr(self, name)
            if part is not None and (len(part) != size or not np.isfinite(part).all()):
                raise ValueError(f"its {name} do not fit its entries")


STORED = {"starts": "indptr", "columns": "indices", "values": "data"}  # names in a file that scipy prescribes
REQUIRED_PARTS = ("starts", "columns", "values", "prefix_utterance", "prefix_length")
OPTIONAL_PARTS = ("weights", "contradictions", "omega2_prefixes", "shuffled")


class _Rows(NamedTuple):
    """Some rows of the matrix, and the entries of all of them in one array."""

    row_sizes: Array
    prefix_utterance: Array
    prefix_length: Array
    tokens: Array
    values: Array  # (a, e)
    weights: Array
    contradictions: Array | float = 0.0  # (a,)
    ambiguous: int = 0
    contradicting: int = 0


def build_matrix(data: RewardData, vocab_size: int, attributes: Sequence[str] = ()) -> RewardMatrix:
    """Build P_Ω([R_1 … R_a]) from tokenised data. Prefixes contain prompts, but only tokens of texts are entries."""
    utterances = _Utterances(data)
    active = np.arange(len(utterances.rows))
    nodes = np.zeros(len(active), np.int64)  # the number of the prefix that each utterance has at this depth
    parts, loners, departures, depth = [], [], [], 0
    while len(active):
        company = np.bincount(nodes)[nodes] > 1
        loners.append(active[~company])
        departures.append(np.full(len(loners[-1]), depth))
        active, nodes, part = _read_level(utterances, active[company], nodes[company], depth, vocab_size)
        parts.append(part)
        depth += 1
    parts.append(_read_tails(utterances, np.concatenate(loners), np.concatenate(departures)))
    *arrays, contradictions, ambiguous, contradicting = zip(*parts, strict=True)
    row_sizes, prefix_utterance, prefix_length, columns, values, weights = (
        np.concatenate(part, axis=-1) for part in arrays
    )
    starts, (a, _) = np.concatenate([[0], np.cumsum(row_sizes, dtype=np.int64)]), values.shape
    attribute: Array | int = 0
    where: Array | slice = slice(None)
    if a > 1:  # a row holds its tokens once for each attribute
        sizes = np.repeat(row_sizes, a)
        where = concatenate_ranges(np.repeat(starts[:-1], a), sizes)
        attribute = np.repeat(np.tile(np.arange(a, dtype=np.int32), len(row_sizes)), sizes)
    in_omega2 = row_sizes >= 2
    tokens = concatenate_ranges(data.offsets[prefix_utterance[in_omega2]], prefix_length[in_omega2].astype(np.int64))
    return RewardMatrix(
        starts=a * starts,
        columns=attribute * vocab_size + columns[where],
        values=values[attribute, where],
        prefix_utterance=prefix_utterance,
        prefix_length=prefix_length,
        vocab_size=vocab_size,
        utterances=len(data),
        ambiguous=a * sum(ambiguous),
        contradicting=sum(contradicting),
        attributes=tuple(attributes or ([UNNAMED] if a == 1 else [f"{UNNAMED} {n + 1}" for n in range(a)])),
        weights=weights[where],
        contradictions=sum(contradictions, np.zeros(a)),
        omega2_prefixes=data.token_ids[tokens].astype(np.int32),
    )


def shuffle_labels(data: RewardData, seed: int) -> RewardData:
    """Permute the labels of the utterances that count for the matrix; labels of one utterance stay together."""
    counting = _counting_rows(data)
    labels = np.array(data.labels)
    labels[counting] = labels[np.random.default_rng(seed).permutation(counting)]
    return data.with_labels(labels)


def _counting_rows(data: RewardData) -> Int[Array, " u"]:
    """Rows with a positive weight and at least one token of text."""
    sizes = np.diff(data.offsets) - data.prompt_lengths
    counting = data.rows[(data.weights[data.rows] > 0) & (sizes[data.rows] > 0)]
    if not len(counting):
        raise DataError(
            f"none of the {len(data)} rows count: their weights are 0 or less, or their texts have no tokens.",
            "give a --weight column with positive numbers, or leave --weight out.",
        )
    return counting


class _Utterances:
    """The utterances that count for the matrix. Positions count from the first token of prompt and text together."""

    def __init__(self, data: RewardData):
        counting = _counting_rows(data)
        self.rows, self.tokens = counting, data.token_ids
        self.starts = data.offsets[counting]
        self.lengths = data.offsets[counting + 1] - self.starts
        self.prompt_lengths = data.prompt_lengths[counting].astype(np.int64)
        self.labels = np.ascontiguousarray(data.labels[counting].T, dtype=np.float64)  # (a, u)
        texts = (self.lengths - self.prompt_lengths).astype(np.float64)
        self.scale = data.weights[counting] / (texts * (texts + 1) / 2)  # λ_t = scale · t

    def weights(self, utterances: Array, positions: Array | int) -> Array:
        """λ of the tokens at these positions; 0 where they belong to the prompt."""
        return self.scale[utterances] * np.maximum(positions + 1 - self.prompt_lengths[utterances], 0)


def _read_level(
    utterances: _Utterances, active: Array, nodes: Array, depth: int, vocab_size: int
) -> tuple[Array, Array, _Rows]:
    """Read the rows of all shared prefixes of one length.

    Returns the utterances that are longer, the numbers of their prefixes at the next depth, and the rows.
    """
    keys = nodes * vocab_size + utterances.tokens[utterances.starts[active] + depth]
    order = np.argsort(keys, kind="stable")
    active = active[order]
    keys, first, entries = np.unique(keys[order], return_index=True, return_inverse=True)
    weights, labels = utterances.weights(active, depth), utterances.labels[:, active]
    seen = weights > 0
    sums, totals = np.add.reduceat(weights, first), np.add.reduceat(weights * labels, first, axis=1)
    counts = np.bincount(entries[seen], minlength=len(keys))
    known = counts > 0
    means = np.divide(totals, sums, out=np.zeros_like(totals), where=known)
    example = np.empty_like(means)  # one of the labels of each entry
    example[:, entries[seen]] = labels[:, seen]
    differs = seen & (labels != example[:, entries])
    rows, row_starts, row_sizes = np.unique((keys // vocab_size)[known], return_index=True, return_counts=True)
    part = _Rows(
        row_sizes=row_sizes,
        prefix_utterance=utterances.rows[active[first[known][row_starts]]].astype(np.int32),
        prefix_length=np.full(len(rows), depth, np.int32),
        tokens=(keys % vocab_size)[known].astype(np.int32),
        values=means[:, known],
        weights=sums[known],
        contradictions=np.square(labels - means[:, entries]) @ weights,
        ambiguous=int((counts > 1).sum()),
        contradicting=sum(len(np.unique(entries[part])) for part in differs),
    )
    going_on = utterances.lengths[active] > depth + 1
    return active[going_on], entries[going_on], part


def _read_tails(utterances: _Utterances, loners: Array, departures: Array) -> _Rows:
    """Read the rows of prefixes that belong to one utterance each: their one entry is its label."""
    begins = np.maximum(departures, utterances.prompt_lengths[loners])
    sizes = utterances.lengths[loners] - begins
    owners, positions = np.repeat(loners, sizes), concatenate_ranges(begins, sizes)
    return _Rows(
        row_sizes=np.ones(len(owners), np.int32),
        prefix_utterance=utterances.rows[owners].astype(np.int32),
        prefix_length=positions.astype(np.int32),
        tokens=utterances.tokens[utterances.starts[owners] + positions].astype(np.int32),
        values=utterances.labels[:, owners],
        weights=utterances.weights(owners, positions),
    )


def concatenate_ranges(starts: Array, sizes: Array) -> Array:
    """Concatenate the ranges start, start + 1, …, start + size − 1 of all pairs."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1] if len(ends) else 0)
