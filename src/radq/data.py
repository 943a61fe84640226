"""Files → examples → batches.

    data = load_data(["reviews.csv.gz"], tokenizer, DataColumns(text="text", labels=["praise"]))
    data.batch([0, 5, 7])["input_ids"]

Tables are read in pieces, tokenised once by all cores, and kept on disk: tokens of all rows in one flat memory-mapped
array, so that millions of rows take no memory. A batch is cut out of it with array operations, not row by row.
"""

import gzip
import hashlib
import json
import lzma
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.errors import DataError, OptionError
from radq.files import default_cache_folder, whole_folder

Table = Any  # a pandas.DataFrame, which is imported only where a table is read
ROWS_PER_PIECE = 5_000
FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".xz", ".zst")
CACHE_FORMAT = 1
NO_LIMIT = 2**31  # more tokens than any text has


@dataclass(frozen=True)
class DataColumns:
    """Which columns mean what.

    Args:
        text: the utterance.
        labels: responses, one column per attribute; none where only texts are needed (distillation).
        prompt: context before the utterance, which carries no loss and does not count in its length.
        weight: how much a row counts.
        label_range: (low, high) of the labels, to be mapped to [0, 1]; None takes labels as they are.
        skip_empty: leave rows with an empty text out, and count them; otherwise one is an error.
    """

    text: str = "text"
    labels: Sequence[str] = ()
    prompt: str | None = None
    weight: str | None = None
    label_range: tuple[float, float] | None = None
    skip_empty: bool = False

    @property
    def names(self) -> list[str]:
        return [name for name in (self.text, self.prompt, self.weight, *self.labels) if name is not None]


@dataclass
class Counts:
    """What was read: stored with the cache, shown to the user."""

    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    empty: int = 0  # and so left out
    label_low: list[float] = field(default_factory=list)
    label_high: list[float] = field(default_factory=list)


class RewardData(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Tokenised rows in a folder; a map-style data set whose items are whole batches (see `__getitems__`)."""

    def __init__(self, folder: Path, rows: np.ndarray | None = None):
        stored = json.loads((folder / "counts.json").read_text())
        self.folder = folder
        self.counts = Counts(**stored["counts"])
        self.offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        self.tokens = np.memmap(folder / "tokens.bin", dtype=stored["dtype"], mode="r")
        self.prompt_lengths = np.load(folder / "prompt_lengths.npy", mmap_mode="r")
        self.labels = np.load(folder / "labels.npy", mmap_mode="r")  # (n, a)
        self.weights = np.load(folder / "weights.npy", mmap_mode="r")
        self.rows = np.arange(len(self.weights)) if rows is None else rows
        self.targets: np.ndarray | None = None  # (tokens, a): rewards of a teacher, where they were computed ahead

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batch([index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return self.batch(indices)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)[self.rows]

    @property
    def response_range(self) -> tuple[float, float]:
        """(0, 1) unless the labels saw more."""
        low, high = min(self.counts.label_low, default=0.0), max(self.counts.label_high, default=1.0)
        return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high)

    def split(self, share: float, seed: int) -> tuple["RewardData", "RewardData"]:
        """The rows without a random share of them, and that share."""
        order = np.random.default_rng(seed).permutation(self.rows)
        cut = max(1, round(len(order) * share))
        return RewardData(self.folder, np.sort(order[cut:])), RewardData(self.folder, np.sort(order[:cut]))

    def where(self, chosen: np.ndarray) -> "RewardData":
        """The rows that are marked."""
        return RewardData(self.folder, self.rows[chosen])

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Rows side by side, padded on the right to the longest of them. No rows make a batch that weighs nothing."""
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        starts, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        columns = np.arange(max(1, lengths.max(initial=1)))
        mask = columns < lengths[:, None]  # (b, t)
        where = np.where(mask, starts[:, None] + columns, 0)
        batch: dict[str, np.ndarray] = {
            "rows": rows,
            "input_ids": np.where(mask, self.tokens[where].astype(np.int64), 0),
            "attention_mask": mask.astype(np.int64),
            "loss_mask": (mask & (columns >= self.prompt_lengths[rows][:, None])).astype(np.int64),
            "responses": self.labels[rows],
            "weights": self.weights[rows],
        }
        if self.targets is not None:
            batch["targets"] = np.where(mask[..., None], self.targets[where], 0)
        if not len(rows):
            batch = _weightless(batch)
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in batch.items()}


def _weightless(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One row of padding in place of none: a process without rows still has to take part in a step."""
    return {name: np.zeros((1, *values.shape[1:]), values.dtype) for name, values in batch.items()}


class GlobalBatches(torch.utils.data.Sampler[list[int]]):
    """Deals the rows of an epoch to processes: batches of rows of similar length, in random order.

    An epoch is a list of global batches that depends on seed and epoch alone. Each is cut into `num_micro_batches` ×
    `world_size` parts, so that the rows of an optimizer step are the same for any number of processes and accumulated
    parts. Parts may differ by a row, and be empty at the end of an epoch.
    """

    POOL = 50  # batches sorted by length together: less padding, still random

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

    def plan(self) -> list[np.ndarray]:
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


def load_data(
    sources: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    columns: DataColumns,
    max_length: int = 512,
    cache_folder: str | Path | None = None,
    progress: bool = False,
) -> RewardData:
    """Tokenise files or hub data sets, or find what an earlier call has tokenised."""
    if not sources:
        raise OptionError("there is no data.", "give one or more files.")
    folder = Path(cache_folder or default_cache_folder()) / _cache_key(sources, tokenizer, columns, max_length)
    if not (folder / "counts.json").is_file():
        with whole_folder(folder) as temporary:
            _tokenise(sources, tokenizer, columns, max_length, temporary, progress)
    return RewardData(folder)


def _cache_key(
    sources: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase, columns: DataColumns, max_length: int
) -> str:
    files = []
    for source in sources:
        path = Path(source)
        known = [path.resolve().as_posix(), path.stat().st_size, path.stat().st_mtime_ns] if path.is_file() else source
        files.append(known)
    vocabulary = hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest()
    description = [CACHE_FORMAT, files, vocabulary, asdict(columns), max_length]
    return hashlib.sha256(json.dumps(description, default=str).encode()).hexdigest()[:24]


def _tokenise(
    sources: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    columns: DataColumns,
    max_length: int,
    folder: Path,
    progress: bool,
) -> None:
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    counts = Counts(label_low=[np.inf] * len(columns.labels), label_high=[-np.inf] * len(columns.labels))
    lengths, prompt_lengths, labels, weights = [], [], [], []
    with (folder / "tokens.bin").open("wb") as tokens, tqdm(unit="row", desc="tokenising", disable=not progress) as bar:
        for piece in (piece for source in sources for piece in read_examples(source, columns)):
            whole = _encode(tokenizer, piece.texts)
            texts = [ids[:max_length] for ids in whole]
            prompts = _encode(tokenizer, piece.prompts)  # what is too long loses its beginning
            kept = [p[max(0, len(p) + len(t) - max_length) :] for p, t in zip(prompts, texts, strict=True)]
            rows = [prompt + text for prompt, text in zip(kept, texts, strict=True)]
            np.fromiter(chain.from_iterable(rows), dtype=dtype).tofile(tokens)
            lengths.append(np.array([len(row) for row in rows]))
            prompt_lengths.append(np.array([len(prompt) for prompt in kept]))
            counts.empty += piece.empty
            counts.truncated += sum(len(row) < len(p) + len(t) for row, p, t in zip(rows, prompts, whole, strict=True))
            labels.append(piece.labels)
            weights.append(piece.weights)
            if columns.labels and rows:
                counts.label_low = np.minimum(counts.label_low, piece.labels.min(0)).tolist()
                counts.label_high = np.maximum(counts.label_high, piece.labels.max(0)).tolist()
            bar.update(len(rows))
    sizes = np.concatenate(lengths) if lengths else np.empty(0, dtype=np.int64)
    counts.rows, counts.tokens = len(sizes), int(sizes.sum())
    if not counts.rows:
        raise DataError(f"{', '.join(map(str, sources))}: there are no rows.", "is it the right file?")
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))
    np.save(folder / "prompt_lengths.npy", np.concatenate(prompt_lengths).astype(np.int32))
    np.save(folder / "labels.npy", np.concatenate(labels))
    np.save(folder / "weights.npy", np.concatenate(weights))
    (folder / "counts.json").write_text(json.dumps({"counts": asdict(counts), "dtype": dtype.name}))


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids without special tokens: BOS is the model's business."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(texts, add_special_tokens=False).input_ids
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]  # on all cores


# --- reading tables ---


@dataclass
class Piece:
    """Some consecutive rows of a source."""

    texts: list[str]
    prompts: list[str]
    labels: np.ndarray  # (n, a)
    weights: np.ndarray  # (n,)
    empty: int  # rows left out


def read_examples(source: str | Path, columns: DataColumns) -> Iterator[Piece]:
    """The rows of a file or hub data set, checked; an error names source, row and value."""
    first_row = 1
    for table in read_table(source):
        _check_columns(source, table, columns.names)
        table.index = np.arange(first_row, first_row + len(table))  # row numbers, for errors
        first_row += len(table)
        texts = _texts(table, columns.text)
        full = np.array([text != "" for text in texts], dtype=bool)
        if not full.all() and not columns.skip_empty:
            row = table.index[int(np.argmin(full))]
            raise DataError(f"{source}, row {row}: {columns.text!r} is empty.", "leave such rows out by --skip-empty.")
        table = table[full]
        labels = np.array([_numbers(source, table, name) for name in columns.labels]).T.reshape(
            len(table), len(columns.labels)
        )
        if columns.label_range is not None:
            low, high = columns.label_range
            labels = (labels - low) / (high - low)
        yield Piece(
            texts=[text for text in texts if text],
            prompts=[""] * len(table) if columns.prompt is None else _texts(table, columns.prompt),
            labels=labels.astype(np.float32),
            weights=np.ones(len(table), np.float32)
            if columns.weight is None
            else _numbers(source, table, columns.weight).astype(np.float32),
            empty=int((~full).sum()),
        )


def read_texts(source: str | Path, column: str) -> list[str]:
    """All texts of a column, empty ones included."""
    texts = []
    for table in read_table(source):
        _check_columns(source, table, [column])
        texts += _texts(table, column)
    return texts


def _check_columns(source: str | Path, table: Table, names: list[str]) -> None:
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise DataError(
            f"{source} has no column {missing[0]!r}.", f"it has {', '.join(map(str, table.columns)) or 'none'}."
        )


def _texts(table: Table, column: str) -> list[str]:
    """Texts without trailing whitespace; what is missing is empty."""
    return ["" if value is None or value != value else str(value).rstrip() for value in table[column]]


def _numbers(source: str | Path, table: Table, column: str) -> np.ndarray:
    import pandas

    numbers = np.asarray(pandas.to_numeric(table[column], errors="coerce"), dtype=np.float64)
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        row, value = table.index[wrong[0]], table[column].iloc[int(wrong[0])]
        raise DataError(f"{source}, row {row}: {column!r} is {value!r}.", "labels and weights are finite numbers.")
    return numbers


def read_table(source: str | Path) -> Iterator[Table]:
    """Pieces of a table: csv, tsv, jsonl or parquet, maybe compressed, or a hub data set."""
    path = Path(source)
    if not path.is_file():
        yield from _read_hub(str(source))
        return
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = next((suffix for suffix in reversed(suffixes) if suffix in FORMATS), None)
    if kind is None:
        raise DataError(
            f"{str(path)!r} has no ending that radq knows.",
            f"use {', '.join(FORMATS)}, each maybe followed by {', '.join(COMPRESSIONS)}.",
        )
    try:
        with _open(path) as stream:
            yield from _read_stream(stream, kind)
    except (UnicodeDecodeError, EOFError, lzma.LZMAError, gzip.BadGzipFile, ValueError, OSError) as error:
        if isinstance(error, DataError):
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{str(path)!r} cannot be read as {kind[1:]}: {reason}.", "is the file whole?") from error


def _read_stream(stream: Any, kind: str) -> Iterator[Table]:
    import pandas

    if kind == ".parquet":
        from pyarrow.parquet import ParquetFile

        with tempfile.TemporaryFile() as seekable:  # parquet is read from its end
            shutil.copyfileobj(stream, seekable)
            for piece in ParquetFile(seekable).iter_batches(ROWS_PER_PIECE):
                yield piece.to_pandas()
    elif kind == ".jsonl":
        options: Any = {"dtype": False}  # as they stand: no guesses at dates and types
        yield from pandas.read_json(stream, lines=True, chunksize=ROWS_PER_PIECE, **options)
    else:  # as text, so that "NA" and "null" stay words
        separator = "," if kind == ".csv" else "\t"
        options = {} if kind == ".csv" else {"quoting": 3}  # tab separated files quote nothing
        options |= {"sep": separator, "dtype": str, "keep_default_na": False, "chunksize": ROWS_PER_PIECE}
        yield from pandas.read_csv(stream, **options)


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".xz":
        return lzma.open(path)
    if path.suffix == ".zst":
        import pyarrow

        return pyarrow.input_stream(str(path), compression="zstd")
    return path.open("rb")


def _read_hub(name: str) -> Iterator[Table]:
    """`name` or `name:split` of a data set on the hub."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            f"there is no file {name!r}.", "check the path; for a hub data set, pip install 'radq[data]'."
        ) from error
    name, _, split = name.partition(":")
    try:
        table = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # the library raises many kinds
        raise DataError(f"there is neither a file nor a data set {name!r}: {error}.", "check the name.") from error
    for first in range(0, len(table), ROWS_PER_PIECE):
        yield table.select(range(first, min(first + ROWS_PER_PIECE, len(table)))).to_pandas()
