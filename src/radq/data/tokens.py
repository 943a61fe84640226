"""Tokenised rows on disk: those of the same files, columns and tokenizer are tokenised once, by all cores.

folder = tokenise_rows(["reviews.csv.gz"], tokenizer, DataColumns(), max_length=512, cache_folder=None, progress=True)
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from radq.data.examples import NO_SPAN, SPAN_FOLDER, SPAN_NUMBERS, Piece, count_shared, mark_tokens
from radq.data.label_scale import join_cells
from radq.data.tables import find_revision, split_hub_name
from radq.errors import DataError, OptionError
from radq.files import atomic_folder, default_cache_folder, fingerprint_file, fingerprint_values

CACHE_FORMAT = 4
COUNTS = "counts.json"  # the file that is written last


@dataclass
class Counts:
    """Numbers about the rows that were read, which are stored with them."""

    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    empty: int = 0  # rows that were left out


@runtime_checkable
class Columns(Protocol):
    """A dataclass with the names of the columns of a table, which reads and checks their rows."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def read(self, source: str | Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]: ...


def tokenise_rows(
    sources: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    columns: Columns,
    max_length: int,
    cache_folder: str | Path | None,
    progress: bool,
) -> Path:
    """Find the folder with the tokenised rows of these sources and columns, or write it."""
    if not sources:
        raise OptionError("there is no data.", "give one or more files.")
    tokenizer("", add_special_tokens=False)  # this call turns off padding and truncation that its file may ask for
    known = [_identify(source) for source in sources]
    settings = {name: value for name, value in asdict(columns).items() if name != "label_rules"}  # these come later
    settings["chat_template"] = tokenizer.chat_template
    key = fingerprint_values(CACHE_FORMAT, known, _identify_tokenizer(tokenizer), settings, max_length)
    folder = Path(cache_folder or default_cache_folder()) / key
    if not (folder / COUNTS).is_file():
        pieces = (piece for source in sources for piece in columns.read(source, tokenizer))
        with atomic_folder(folder, proof=COUNTS) as temporary:
            _tokenise(pieces, ", ".join(map(str, sources)), tokenizer, max_length, temporary, progress)
    return folder


def _identify(source: str | Path) -> list[object]:
    """Names and contents of the files of a source; for a hub data set, its name and revision."""
    path = Path(source)
    if path.is_file():
        return [path.name, fingerprint_file(path)]
    name, split = split_hub_name(str(source))
    path = Path(name)
    if not path.is_dir():
        return [name, split, find_revision(name)]
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return [split, *((file.relative_to(path).as_posix(), fingerprint_file(file)) for file in files)]


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
    pieces: Iterable[Piece],
    names: str,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    folder: Path,
    progress: bool,
) -> None:
    """Write the tokenised rows of all sources, whose `names` stand in errors, into a folder."""
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    counts = Counts()
    sizes, prompt_sizes, labels, weights, span_labels = [], [], [], [], []
    with (folder / "tokens.bin").open("wb") as tokens, tqdm(unit="row", desc="tokenising", disable=not progress) as bar:
        for piece in pieces:
            whole, prompts = _encode(tokenizer, piece.texts), _encode(tokenizer, piece.prompts)
            if piece.compares:
                whole = leave_out_ends(whole, prompts, piece.labels.rows, tokenizer, max_length)
                whole, prompts = share_beginnings(whole, prompts, piece.labels.rows)
            texts = [ids[:max_length] for ids in whole]
            # a prompt that is too long loses its beginning
            kept = [p[max(0, len(p) + len(t) - max_length) :] for p, t in zip(prompts, texts, strict=True)]
            rows = [prompt + text for prompt, text in zip(kept, texts, strict=True)]
            np.fromiter(chain.from_iterable(rows), dtype=dtype).tofile(tokens)
            sizes += map(len, rows)
            prompt_sizes += map(len, kept)
            if piece.spans is not None:
                limits, cells = piece.spans
                marks = mark_tokens(tokenizer, piece.texts, limits, sum(len(part.rows) for part in span_labels))
                with (folder / SPAN_NUMBERS).open("ab") as stream:  # a prompt has no spans
                    for prompt, text, numbers in zip(kept, texts, marks, strict=True):
                        np.full(len(prompt), NO_SPAN, np.int32).tofile(stream)
                        numbers[: len(text)].tofile(stream)
                span_labels.append(cells)
            counts.empty += piece.empty
            counts.truncated += sum(len(row) < len(p) + len(t) for row, p, t in zip(rows, prompts, whole, strict=True))
            labels.append(piece.labels)
            weights.append(piece.weights)
            bar.update(len(rows))
    counts.rows, counts.tokens = len(sizes), sum(sizes)
    if not counts.rows:
        raise DataError(f"{names}: there are no rows.", "give a file with one row or more.")
    if not counts.tokens:
        raise DataError(
            f"{names}: the tokenizer finds no tokens in these texts.",
            "choose a model whose tokenizer knows the language of the texts.",
        )
    np.save(folder / "offsets.npy", np.cumsum([0, *sizes], dtype=np.int64))
    np.save(folder / "prompt_lengths.npy", np.array(prompt_sizes, np.int32))
    join_cells(labels).save(folder)
    if span_labels:
        (folder / SPAN_FOLDER).mkdir()
        join_cells(span_labels).save(folder / SPAN_FOLDER)
    np.save(folder / "weights.npy", np.concatenate(weights))
    (folder / COUNTS).write_text(json.dumps({"counts": asdict(counts), "dtype": dtype.name}))


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Encode texts without special tokens; the model adds a BOS itself."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(texts, add_special_tokens=False).input_ids
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]  # on all cores


def leave_out_ends(
    texts: list[list[int]],
    prompts: list[list[int]],
    rows: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> list[list[int]]:
    """Take the end of turn off all texts of a row of which one will be cut at `max_length`.

    The cut text has lost its end, which weighs most in a text, and beside the others it would teach that ends are bad,
    or good. Texts of a row have the same number in `rows`, (n,).
    """
    rest, _ = share_beginnings(texts, prompts, rows)
    cut = {int(row) for row, ids in zip(rows, rest, strict=True) if len(ids) > max_length}
    if not cut:
        return texts
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    special = {*special, *tokenizer.all_special_ids} - {tokenizer.unk_token_id}  # pyright: ignore[reportUnhashable]

    def leave_out(ids: list[int]) -> list[int]:
        body = len(ids)
        while body and ids[body - 1] in special:
            body -= 1
        while 0 < body < len(ids) and not str(tokenizer.decode(ids[body - 1 : body])).strip():
            body -= 1  # a template's space before the end
        return ids[:body]

    return [leave_out(ids) if row in cut else ids for row, ids in zip(rows.tolist(), texts, strict=True)]


def share_beginnings(
    texts: list[list[int]], prompts: list[list[int]], rows: np.ndarray
) -> tuple[list[list[int]], list[list[int]]]:
    """Move the tokens with which all texts of a row begin to the ends of their prompts; one token at least stays.

    Texts of a row stand side by side and have the same number in `rows`, (n,).
    """
    cuts = []
    for _, group in groupby(range(len(texts)), key=lambda n: rows[n]):
        members = [texts[n] for n in group]
        cuts += [max(0, min(count_shared(members), min(map(len, members)) - 1))] * len(members)
    parts = list(zip(texts, prompts, cuts, strict=True))
    return [text[cut:] for text, _, cut in parts], [prompt + text[:cut] for text, prompt, cut in parts]
