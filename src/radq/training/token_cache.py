"""Numbers of each token of a data set, computed once and kept on disk: states that a readout reads, and targets.

    (states,) = prepare_states(model, [data], folder, base_fingerprint, precision)
    states.make(progress=True)
    data.batch([3, 0])["states"]  # (2, t, n)

A training of several epochs then runs the base model, or the teacher, over each text once. Numbers are computed in
pieces, each of which is a file. Axes: b texts, t time, n numbers of a token, such as the states of all layers that are
read, side by side.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from radq.data.dataset import RewardData
from radq.files import default_cache_folder, fingerprint_arrays, fingerprint_values, format_bytes
from radq.models.kv_cache import known_positions
from radq.models.reward import RewardModel
from radq.store import StoredPiece, check_room, missing
from radq.training.teacher import Limits, Teacher
from radq.training.trainer_setup import in_precision

STATE_PIECE, TARGET_PIECE = 2**26, 2**18  # bytes of a file, about: as many as a CPU computes in a minute
TOKENS_PER_FORWARD = 4096  # with padding
ROWS_AT_ONCE = 1024  # whose targets are in memory together


class TokenCache:
    """Numbers of all tokens of a data set, in the order of the tokens, in a folder whose name tells what they are of.

    Args:
        name: that of the numbers in the batches of the data.
        compute: computes the numbers of a batch of texts, (b, t, width).
        piece_bytes: size of a file, about.
    """

    def __init__(
        self,
        name: str,
        data: RewardData,
        folder: Path,
        compute: Callable[[dict[str, Tensor]], Tensor],
        width: int,
        dtype: torch.dtype,
        piece_bytes: int,
    ):
        self.name, self.folder, self.compute, self.dtype = name, folder, compute, dtype
        self.stored, self.data = data.stored, copy.copy(data)
        self.data.stored = {}  # texts are computed from their tokens alone
        self.num_tokens, self.lengths = len(data.token_ids), np.diff(data.offsets)
        self.token_bytes = width * dtype.itemsize
        self.seconds, self.num_computed = 0.0, 0  # of tokens whose numbers were not stored before
        pieces = np.minimum(data.offsets[:-1], self.num_tokens - 1) * self.token_bytes // piece_bytes
        self._first_texts = np.flatnonzero(np.diff(pieces, prepend=-1))  # of each piece

    @property
    def missing_bytes(self) -> int:
        """The number of bytes that are still to be written."""
        return sum(piece.size for piece in missing(self.pieces()))

    def make(self, progress: bool = False, description: str = "hidden states") -> None:
        """Compute and store the numbers that are not stored yet; batches of the data have them from then on."""
        began, total = time.perf_counter(), self.missing_bytes // self.token_bytes
        with tqdm(total=total, desc=description, unit="token", disable=not progress or not total) as bar:
            for piece in missing(self.pieces()):
                with piece.writing() as temporary:
                    self._compute_piece(piece.contents, bar).tofile(temporary)
        self.num_computed += total
        self.seconds += time.perf_counter() - began
        self.stored[self.name] = self.read

    def read(self, texts: Int[np.ndarray, " b"]) -> Float[np.ndarray, "b t n"]:
        """Read the numbers of texts, with zeros after the end of each."""
        lengths = self.lengths[texts]
        numbers = np.zeros((len(texts), max(1, lengths.max(initial=1)), self.token_bytes), np.uint8)
        pieces = np.searchsorted(self._first_texts, texts, side="right") - 1
        starts = self.data.offsets[texts] - self.data.offsets[self._first_texts[pieces]]
        for row, (piece, start, length) in enumerate(zip(pieces, starts, lengths, strict=True)):
            numbers[row, :length] = self._maps[piece][start : start + length]
        return torch.from_numpy(numbers).view(self.dtype).float().numpy()  # numpy has no bfloat16

    @cached_property
    def _maps(self) -> list[np.ndarray]:
        shape = (-1, self.token_bytes)
        return [np.memmap(piece.file, np.uint8, "r").reshape(shape) for piece in self.pieces()]

    def pieces(self) -> Iterator[StoredPiece[np.ndarray]]:
        """List the files, with the numbers of their texts."""
        ends = [*self._first_texts[1:], len(self.data.offsets) - 1]
        for n, (first, end) in enumerate(zip(self._first_texts, ends, strict=True)):
            size = int(self.data.offsets[end] - self.data.offsets[first]) * self.token_bytes
            yield StoredPiece(self.folder / f"{n:05}.bin", np.arange(first, end), size)

    def _compute_piece(self, texts: Int[np.ndarray, " b"], bar: tqdm) -> np.ndarray:
        """Compute the numbers of consecutive texts, of which those of similar length are read together."""
        stored = np.empty((int(self.lengths[texts].sum()), self.token_bytes), np.uint8)
        begin = self.data.offsets[texts[0]]
        ordered = texts[np.argsort(self.lengths[texts], kind="stable")]
        per_forward = max(1, TOKENS_PER_FORWARD // max(1, int(self.lengths[texts].max())))
        for first in range(0, len(ordered), per_forward):
            chunk = ordered[first : first + per_forward]
            batch = {name: torch.from_numpy(values) for name, values in self.data.cut_out(chunk).items()}
            rows = self.compute(batch).to("cpu", self.dtype).contiguous().view(torch.uint8).numpy()
            for start, length, row in zip(self.data.offsets[chunk] - begin, self.lengths[chunk], rows, strict=True):
                stored[start : start + length] = row[:length]
            bar.update(int(self.lengths[chunk].sum()))
        return stored


def check_room_for(caches: Sequence[TokenCache], what: str, hint: str) -> None:
    """Refuse to begin if the disk has no room for the numbers that are not stored yet. Data sets may share files."""
    pieces = {piece.file: piece for cache in caches for piece in cache.pieces()}
    if caches:
        check_room(caches[0].folder, pieces.values(), what, hint)


# --- states of a base model ---


def prepare_states(
    model: RewardModel, parts: Sequence[RewardData], cache: str | None, base_fingerprint: str, precision: str
) -> list[TokenCache]:
    """Find the states of data sets, which are still to be made; refuse to begin if the disk is too small."""
    assert model.readout is not None
    assert model.config.backbone is not None
    device, one_token = model.device, torch.ones(1, 1, dtype=torch.int64)

    def compute(batch: dict[str, Tensor]) -> Tensor:
        with in_precision(precision, device), known_positions():
            return model.base_states(batch["input_ids"].to(device), batch["attention_mask"].to(device))

    example = compute({"input_ids": one_token, "attention_mask": one_token})
    # with a BOS before each text, RAD-Q and RAD-V score tokens from other states
    bos = (model.config.bos_token_id, model.config.kind) if model.config.prepend_bos else None
    base = base_fingerprint, model.config.backbone.to_json_string(), bos, model.readout.layers, example.dtype, precision
    caches = []
    for data in parts:
        key = fingerprint_values(*base, fingerprint_arrays([data.token_ids, data.offsets]), STATE_PIECE)
        folder = Path(cache or default_cache_folder()) / "states" / key
        caches.append(TokenCache("states", data, folder, compute, example.shape[-1], example.dtype, STATE_PIECE))
    hint = "make room, name a folder on another disk by --cache, or leave --cache-states out"
    hint += "; fewer --readout-layers and --backbone-dtype bfloat16 need less."
    check_room_for(caches, "the hidden states", hint)
    return caches


def describe_states(caches: Sequence[TokenCache], num_layers: int) -> str:
    """Say how many bytes the states of each data set take, and where they are."""
    lines = {}
    for cache in caches:
        width, total = cache.token_bytes // cache.dtype.itemsize // num_layers, cache.num_tokens * cache.token_bytes
        numbers = f"{cache.num_tokens} tokens × {num_layers} layers × {width} numbers × {cache.dtype.itemsize} bytes"
        there = f"{str(cache.folder)!r}, of which {format_bytes(total - cache.missing_bytes)} are there"
        lines[cache.folder] = f"hidden states: {numbers} = {format_bytes(total)} in {there}"
    return "\n".join(lines.values())


def measure_states(caches: Sequence[TokenCache]) -> dict[str, float]:
    """The number of tokens per second whose states were computed; no metrics if all were stored before."""
    number, seconds = sum(cache.num_computed for cache in caches), sum(cache.seconds for cache in caches)
    return {"state_tokens_per_second": round(number / seconds)} if number else {}


# --- a teacher's rewards ---


def cache_targets(
    folder: Path, data: RewardData, teacher: Teacher, fingerprint: str, precision: str, progress: bool
) -> None:
    """Store the teacher's rewards of all tokens, as far as they are not stored, and let the data read them.

    Their folder is named by the fingerprints of teacher and texts, so that no file serves others.
    """

    @torch.no_grad()
    def compute(batch: dict[str, Tensor]) -> Tensor:
        mask = batch["loss_mask" if teacher.reads_continuations else "attention_mask"]
        with teacher.computing_in(precision):
            return teacher.token_rewards(batch["input_ids"].to(teacher.device), mask.to(teacher.device))

    texts = fingerprint_arrays([data.token_ids, data.offsets, data.prompt_lengths])
    folder = folder / fingerprint_values(fingerprint, texts, precision)
    cache = TokenCache("targets", data, folder, compute, len(teacher.attributes), torch.float32, TARGET_PIECE)
    online = "" if teacher.is_slow else ", or compute them in every step (--online)"
    check_room_for([cache], "the teacher's rewards", f"make room on the disk{online}.")
    cache.make(progress, "rewards of the teacher")


def target_ranges(data: RewardData) -> list[Limits]:
    """The lowest and the highest target of each attribute, over the tokens that the loss is about."""
    ends = []
    for first in range(0, len(data.rows), ROWS_AT_ONCE):
        batch = data.cut_out(data.rows[first : first + ROWS_AT_ONCE])
        targets = batch["targets"][batch["loss_mask"] > 0]  # (m, a)
        ends += [(targets.min(0), targets.max(0))] if len(targets) else []
    lows, highs = (np.array(values) for values in zip(*ends, strict=True))
    return list(zip(lows.min(0).tolist(), highs.max(0).tolist(), strict=True))
