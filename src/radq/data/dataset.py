"""Tokenised texts with labels: from files to batches.

    data = load_data(["reviews.csv.gz"], tokenizer, DataColumns(text="text", labels=["praise"]))
    data.batch([0, 5, 7])["input_ids"]

Tables (`radq.data.tables`) are tokenised once by all cores and kept on disk. The token ids of all rows are one flat
memory-mapped array, so that millions of rows take no memory. A batch is cut out of it with array operations.
Axes: n rows, b batch, t time, a attributes.
"""

import copy
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.data.chats import is_chat, render_answer
from radq.data.label_cells import LabelCells, join_cells, read_cells
from radq.data.label_scale import LabelRules, LabelScale, find_scales, scale_labels
from radq.data.span_cells import SpanCells, SpanWriter, read_spans
from radq.data.tables import (
    Table,
    cell_text,
    check_columns,
    column_numbers,
    read_table,
    refuse_rows,
    split_hub_name,
)
from radq.errors import DataError, OptionError
from radq.files import default_cache_folder, fingerprint_arrays, fingerprint_values, whole_folder

CACHE_FORMAT = 3
NO_LIMIT = 2**31  # more tokens than any text has
# Tensors of a batch with a column for each token.
OF_TOKENS = ("input_ids", "attention_mask", "loss_mask", "targets", "token_labels", "states")


@dataclass(frozen=True)
class DataColumns:
    """Names of the columns of a table, and how to read them.

    Args:
        text: column with the texts, or with chats: lists of messages of which the last one is the text.
        labels: columns with the labels, one per attribute; none for distillation, which needs texts alone.
        prompt: column with a context that stands before each text, or with the first messages of a chat; the loss does
            not count its tokens.
        weight: column with the weight of each row, at least 0.
        label_rules: how labels become numbers, where radq is not to decide.
        skip_empty: skip and count rows with an empty text; by default such a row is an error.
        spans: column with spans of the texts that have labels of their own, see `radq.data.spans`.
    """

    text: str = "text"
    labels: Sequence[str] = ()
    prompt: str | None = None
    weight: str | None = None
    label_rules: LabelRules = field(default_factory=LabelRules)
    skip_empty: bool = False
    spans: str | None = None

    @property
    def names(self) -> list[str]:
        """Names of all columns that are read."""
        return [name for name in (self.text, self.prompt, self.weight, self.spans, *self.labels) if name is not None]


@dataclass
class Counts:
    """Numbers about the rows that were read, which are stored with them."""

    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    empty: int = 0  # rows that were left out


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
            stored = json.loads((folder / "counts.json").read_text())
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
        self.labels = scale_labels(cells, label_names, self.scales)  # (n, a)
        self.targets: np.ndarray | None = None  # (tokens, a): rewards of a teacher, if computed before training
        self.read_states: Callable[[np.ndarray], np.ndarray] | None = None  # reads stored states of texts, (b, t, n)

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
        return list(zip(self.labels.min(0).tolist(), self.labels.max(0).tolist(), strict=True))

    @property
    def mean_labels(self) -> np.ndarray:
        """Weighted mean of the labels of each attribute, (a,): the constant that fits these rows best."""
        return np.average(self.labels[self.rows], axis=0, weights=self.weights[self.rows].astype(np.float64))

    def split(self, share: float, seed: int) -> tuple["RewardData", "RewardData"]:
        """Split the rows at random into two parts, of which the second has this share of them."""
        held_out = np.isin(self.rows, hold_out(self.rows, share, seed))
        return self.where(~held_out), self.where(held_out)

    def where(self, chosen: np.ndarray) -> "RewardData":
        """The part of the rows for which `chosen`, (n,), is true."""
        return self._choose(self.rows[chosen])

    def with_labels(self, labels: np.ndarray) -> "RewardData":
        """The same rows with other labels, such as the scores of a classifier: (n, a), for all rows of the files."""
        changed = self._choose(self.rows)
        changed.labels = labels
        return changed

    def _choose(self, rows: np.ndarray) -> "RewardData":
        chosen = copy.copy(self)
        chosen.rows = rows
        chosen.__dict__.pop("fingerprint", None)  # that of all rows
        return chosen

    def describe(self) -> str:
        """Say how many rows and tokens were read."""
        counts = self.counts
        return f"{counts.rows} rows, {counts.tokens} tokens; {counts.truncated} cut off, {counts.empty} empty left out"

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Batch of rows, padded on the right; without any rows, a batch of one row of padding with weight 0."""
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        batch = {"rows": rows, **self.cut_out(rows), "labels": self.labels[rows], "weights": self.weights[rows]}
        return to_tensors(batch if len(rows) else _pad_empty(batch))

    def cut_out(self, texts: np.ndarray) -> dict[str, np.ndarray]:
        """Tokens, masks and targets of the texts with these numbers, all of them with a column for each token."""
        starts, lengths = self.offsets[texts], self.offsets[texts + 1] - self.offsets[texts]
        columns = np.arange(max(1, lengths.max(initial=1)))
        is_token = columns < lengths[:, None]  # (b, t)
        where = np.where(is_token, starts[:, None] + columns, 0)
        found: dict[str, np.ndarray] = {
            "input_ids": np.where(is_token, self.token_ids[where].astype(np.int64), 0),
            "attention_mask": is_token.astype(np.int64),
            "loss_mask": (is_token & (columns >= self.prompt_lengths[texts][:, None])).astype(np.int64),
        }
        if self.targets is not None:
            found["targets"] = np.where(is_token[..., None], self.targets[where], 0)
        if self.read_states is not None:
            found["states"] = self.read_states(texts)
        return found


def hold_out(units: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Choose this share of the units at random; one at least is chosen, and one at least is left."""
    order = np.random.default_rng(seed).permutation(units)
    cut = max(1, round(len(order) * share))
    if cut >= len(order):
        raise DataError(
            f"a share of {share:g} of {len(order)} row{'s' * (len(order) > 1)} leaves none to train on.",
            "lower --eval-share, or give --eval-data.",
        )
    return order[:cut]


def to_tensors(batch: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in batch.items()}


def _pad_empty(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A batch of one row of padding, for a process without rows, which still has to take part in the step."""
    return {name: np.zeros((1, *values.shape[1:]), values.dtype) for name, values in batch.items()}


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
    folder = tokenise_columns(sources, tokenizer, columns, max_length, cache_folder, progress)
    return RewardData(folder, columns.labels, columns.label_rules, scales)


def tokenise_columns(
    sources: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    columns: DataColumns,
    max_length: int,
    cache_folder: str | Path | None,
    progress: bool,
) -> Path:
    """Find the folder with the tokenised rows of these columns, or write it."""
    stored = {name: value for name, value in asdict(columns).items() if name != "label_rules"}  # these come later
    stored["chat_template"] = tokenizer.chat_template

    def read(source: str | Path) -> Iterator[Piece]:
        return read_examples(source, columns, tokenizer)

    return tokenise_once(sources, tokenizer, read, stored, max_length, cache_folder, progress)


def tokenise_once(
    sources: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    read: "Callable[[str | Path], Iterator[Piece]]",
    settings: dict[str, Any],
    max_length: int,
    cache_folder: str | Path | None,
    progress: bool,
) -> Path:
    """Find the folder with the tokenised rows of these sources, or write it.

    `read` yields the rows of a source, and `settings` are all that it depends on.
    """
    if not sources:
        raise OptionError("there is no data.", "give one or more files.")
    tokenizer("", add_special_tokens=False)  # this call turns off padding and truncation that its file may ask for
    known = [_identify(source) for source in sources]
    key = fingerprint_values(CACHE_FORMAT, known, _identify_tokenizer(tokenizer), settings, max_length)
    folder = Path(cache_folder or default_cache_folder()) / key
    if not (folder / "counts.json").is_file():
        pieces = (piece for source in sources for piece in read(source))
        with whole_folder(folder) as temporary:
            _tokenise(pieces, ", ".join(map(str, sources)), tokenizer, max_length, temporary, progress)
    return folder


def _identify(source: str | Path) -> list[object]:
    """Place, sizes and times of the files of a source; for a hub data set, its name."""
    path, split = Path(source), ""
    if not path.is_file():
        name, split = split_hub_name(str(source))
        path = Path(name)
        if not path.is_dir():
            return [str(source)]
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    stats = [(file.as_posix(), file.stat()) for file in files]
    return [path.resolve().as_posix(), split, *((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)]


def _identify_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Fingerprint of all that decides how a tokenizer cuts texts: normaliser, pre-tokenizer, vocabulary and merges."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return fingerprint_values(backend.to_str(), backend.encode_special_tokens)
    with tempfile.TemporaryDirectory() as folder:  # a tokenizer written in Python is described by its files alone
        tokenizer.save_pretrained(folder)
        files = sorted(Path(folder).iterdir())
        return fingerprint_values(type(tokenizer).__name__, [(file.name, file.read_bytes().hex()) for file in files])


def _tokenise(
    pieces: "Iterable[Piece]",
    names: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    folder: Path,
    progress: bool,
) -> None:
    """Write the tokenised rows of all sources, whose `names` stand in errors, into a folder."""
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    counts = Counts()
    lengths, prompt_lengths, labels, weights = [], [], [], []
    spans = SpanWriter(folder, tokenizer)
    with (folder / "tokens.bin").open("wb") as tokens, tqdm(unit="row", desc="tokenising", disable=not progress) as bar:
        for piece in pieces:
            whole, prompts = _encode(tokenizer, piece.texts), _encode(tokenizer, piece.prompts)
            if piece.compares:
                whole, prompts = share_beginnings(whole, prompts, piece.labels.rows)
            texts = [ids[:max_length] for ids in whole]
            # a prompt that is too long loses its beginning
            kept = [p[max(0, len(p) + len(t) - max_length) :] for p, t in zip(prompts, texts, strict=True)]
            rows = [prompt + text for prompt, text in zip(kept, texts, strict=True)]
            np.fromiter(chain.from_iterable(rows), dtype=dtype).tofile(tokens)
            lengths.append(np.array([len(row) for row in rows]))
            prompt_lengths.append(np.array([len(prompt) for prompt in kept]))
            if piece.spans is not None:
                spans.write(piece.spans, piece.texts, [(len(p), len(t)) for p, t in zip(kept, texts, strict=True)])
            counts.empty += piece.empty
            counts.truncated += sum(len(row) < len(p) + len(t) for row, p, t in zip(rows, prompts, whole, strict=True))
            labels.append(piece.labels)
            weights.append(piece.weights)
            bar.update(len(rows))
    sizes = np.concatenate(lengths) if lengths else np.empty(0, dtype=np.int64)
    counts.rows, counts.tokens = len(sizes), int(sizes.sum())
    if not counts.rows:
        raise DataError(f"{names}: there are no rows.", "give a file with one row or more.")
    if not counts.tokens:
        raise DataError(
            f"{names}: the tokenizer finds no tokens in these texts.",
            "choose a model whose tokenizer knows the language of the texts.",
        )
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))
    np.save(folder / "prompt_lengths.npy", np.concatenate(prompt_lengths).astype(np.int32))
    join_cells(labels).save(folder)
    spans.close()
    np.save(folder / "weights.npy", np.concatenate(weights))
    (folder / "counts.json").write_text(json.dumps({"counts": asdict(counts), "dtype": dtype.name}))


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Encode texts without special tokens; the model adds a BOS itself."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(texts, add_special_tokens=False).input_ids
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]  # on all cores


def share_beginnings(
    texts: list[list[int]], prompts: list[list[int]], rows: np.ndarray
) -> tuple[list[list[int]], list[list[int]]]:
    """Move the tokens with which all texts of a row begin to the ends of their prompts; one token at least stays.

    Texts of a row stand side by side and have the same number in `rows`, (n,).
    """
    cuts = []
    for _, group in groupby(range(len(texts)), key=lambda n: rows[n]):
        members = [texts[n] for n in group]
        shared = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, zip(*members, strict=False)))
        cuts += [max(0, min(shared, min(map(len, members)) - 1))] * len(members)
    parts = list(zip(texts, prompts, cuts, strict=True))
    return [text[cut:] for text, _, cut in parts], [prompt + text[:cut] for text, prompt, cut in parts]


# --- rows ---


@dataclass
class Piece:
    """Consecutive rows of a source, read and checked."""

    texts: list[str]
    prompts: list[str]
    labels: LabelCells
    weights: np.ndarray  # (n,)
    empty: int  # rows that were left out
    spans: SpanCells | None = None
    compares: bool = False  # texts of one row are compared, so the tokens with which all of them begin are a prompt


def read_examples(
    source: str | Path, columns: DataColumns, tokenizer: PreTrainedTokenizerBase | None = None
) -> Iterator[Piece]:
    """Read and check the rows of a file or hub data set; an error names source, row and value.

    The tokenizer writes chats as texts; without one, they are refused.
    """
    first_row = 1
    for table in read_table(source):
        check_columns(source, table, columns.names)
        table.index = np.arange(first_row, first_row + len(table))  # row numbers, for errors
        first_row += len(table)
        examples = [*_read_texts(source, table, columns, tokenizer)]
        full = np.array([text != "" for _, text in examples], dtype=bool)
        if not full.all() and not columns.skip_empty:
            first = int(np.argmin(full))
            problem = "does not end with an answer" if is_chat(table[columns.text].iloc[first]) else "is empty"
            place = f"{source}, row {table.index[first]}"
            raise DataError(f"{place}: {columns.text!r} {problem}.", "skip such rows with --skip-empty.")
        table = table[full]
        yield Piece(
            texts=[text for _, text in examples if text],
            prompts=[prompt for prompt, text in examples if text],
            labels=read_cells(source, table, columns.labels),
            spans=None if columns.spans is None else read_spans(source, table, columns.spans, columns.text),
            weights=column_weights(source, table, columns.weight),
            empty=int((~full).sum()),
        )


def _read_texts(
    source: str | Path, table: Table, columns: DataColumns, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[tuple[str, str]]:
    """Read the prompt and the text of each row; of a chat, the messages before the last one are the prompt."""
    prompts = [None] * len(table) if columns.prompt is None else table[columns.prompt]
    for row, prompt, text in zip(table.index, prompts, table[columns.text], strict=True):
        try:
            if tokenizer is not None and (is_chat(text) or is_chat(prompt)):
                yield render_answer(tokenizer, prompt, text)
            else:
                yield cell_text(prompt, columns.prompt or ""), cell_text(text, columns.text)
        except DataError as error:
            raise DataError(f"{source}, row {row}: {error.message}", error.hint) from error


def column_weights(source: str | Path, table: Table, name: str | None) -> np.ndarray:
    """The weights of the rows of a table in single precision, (n,); 1 if there is no column with weights."""
    if name is None:
        return np.ones(len(table), np.float32)
    numbers = column_numbers(source, table, name)
    refuse_rows(source, table, name, numbers < 0, "at least 0")
    return _single(source, table, name, numbers)


def _single(source: str | Path, table: Table, name: str, numbers: np.ndarray) -> np.ndarray:
    """Convert numbers to single precision, in which training computes, and refuse numbers that are too large."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = numbers.astype(np.float32)
    refuse_rows(source, table, name, ~np.isfinite(single), "between -3.4e38 and 3.4e38")
    return single
