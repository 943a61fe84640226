"""Numbers of each token of a data set, computed once and kept on disk: states that a readout reads, and targets.

    states = StateCache(model, data, folder, base_fingerprint, precision)
    states.make(progress=True)
    states.read(np.array([3, 0]))  # (2, t, n)

A training of several epochs then runs the base model, or the teacher, over each text once. States are computed in
pieces, each of which is a file. Axes: b texts, t time, n numbers of a token, which are the states of all layers that
are read, side by side.
"""

import copy
import math
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from tqdm import tqdm

from radq.data.dataset import RewardData
from radq.files import default_cache_folder, fingerprint_arrays, fingerprint_values, format_bytes
from radq.models.kv_cache import known_positions
from radq.models.reward import RewardModel
from radq.store import StoredPiece, check_room, missing
from radq.training.teacher import Limits, Teacher
from radq.training.trainer_setup import in_precision

PIECE_BYTES = 2**26  # of a file, about: as many as a CPU computes in a minute
TOKENS_PER_FORWARD = 4096  # with padding
TARGET_BYTES = 4  # targets are stored in float32


class StateCache:
    """The stored states of all texts of a data set, in the order of their tokens.

    They lie in a folder of their own inside `folder`, whose name is made of all that they depend on.
    """

    def __init__(self, model: RewardModel, data: RewardData, folder: Path, base_fingerprint: str, precision: str):
        assert model.readout is not None
        assert model.config.backbone is not None
        self.model, self.data, self.precision = model, copy.copy(data), precision
        self.data.read_states = None
        self.num_tokens, self.lengths = len(data.token_ids), np.diff(data.offsets)
        self.parts = [data]  # data sets with these tokens, whose batches get the states
        example = self._compute(np.ones((1, 1), np.int64), np.ones((1, 1), np.int64))
        self.dtype, self.token_bytes = example.dtype, example.element_size() * example.shape[-1]
        self.num_layers = len(model.readout.layers)
        tokens = fingerprint_arrays([data.token_ids, data.offsets])
        # with a BOS before each text, RAD-Q and RAD-V score tokens from other states
        bos = (model.config.bos_token_id, model.config.kind) if model.config.prepend_bos else None
        base = base_fingerprint, model.config.backbone.to_json_string(), bos
        key = fingerprint_values(*base, model.readout.layers, self.dtype, precision, tokens, PIECE_BYTES)
        self.folder = folder / key
        self.seconds, self.num_computed = 0.0, 0  # of tokens whose states were not stored before
        pieces = np.minimum(data.offsets[:-1], self.num_tokens - 1) * self.token_bytes // PIECE_BYTES
        self._first_texts = np.flatnonzero(np.diff(pieces, prepend=-1))  # of each piece

    def describe(self) -> str:
        """Say how many bytes the states take, and where they are."""
        itemsize = self.dtype.itemsize
        width = self.token_bytes // itemsize // self.num_layers
        size = format_bytes(self.num_tokens * self.token_bytes)
        there = format_bytes(self.num_tokens * self.token_bytes - self.missing_bytes)
        return (
            f"hidden states: {self.num_tokens} tokens × {self.num_layers} layers × {width} numbers × {itemsize} bytes "
            f"= {size} in {str(self.folder)!r}, of which {there} are there"
        )

    @property
    def missing_bytes(self) -> int:
        """The number of bytes that are still to be written."""
        return sum(piece.size for piece in missing(self.pieces()))

    def make(self, progress: bool = False) -> None:
        """Compute and store the states that are not stored yet; batches of the data get them from then on."""
        began, total = time.perf_counter(), self.missing_bytes // self.token_bytes
        with tqdm(total=total, desc="hidden states", unit="token", disable=not progress or not total) as bar:
            for piece in missing(self.pieces()):
                with piece.writing() as temporary:
                    self._read_base(piece.contents, bar).tofile(temporary)
        self.num_computed += total
        self.seconds += time.perf_counter() - began
        for part in self.parts:
            part.read_states = self.read

    def read(self, texts: Int[np.ndarray, " b"]) -> Float[np.ndarray, "b t n"]:
        """Read the states of texts, with zeros after the end of each."""
        lengths = self.lengths[texts]
        states = np.zeros((len(texts), max(1, lengths.max(initial=1)), self.token_bytes), np.uint8)
        pieces = np.searchsorted(self._first_texts, texts, side="right") - 1
        starts = self.data.offsets[texts] - self.data.offsets[self._first_texts[pieces]]
        for row, (piece, start, length) in enumerate(zip(pieces, starts, lengths, strict=True)):
            states[row, :length] = self._maps[piece][start : start + length]
        return torch.from_numpy(states).view(self.dtype).float().numpy()  # numpy has no bfloat16

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

    def _read_base(self, texts: Int[np.ndarray, " b"], bar: tqdm) -> np.ndarray:
        """Compute the states of consecutive texts, of which those of similar length are read together."""
        stored = np.empty((int(self.lengths[texts].sum()), self.token_bytes), np.uint8)
        begin = self.data.offsets[texts[0]]
        ordered = texts[np.argsort(self.lengths[texts], kind="stable")]
        per_forward = max(1, TOKENS_PER_FORWARD // max(1, int(self.lengths[texts].max())))
        for first in range(0, len(ordered), per_forward):
            chunk = ordered[first : first + per_forward]
            batch = self.data.cut_out(chunk)
            states = self._compute(batch["input_ids"], batch["attention_mask"]).to("cpu", self.dtype)
            rows = states.contiguous().view(torch.uint8).numpy()
            for start, length, row in zip(self.data.offsets[chunk] - begin, self.lengths[chunk], rows, strict=True):
                stored[start : start + length] = row[:length]
            bar.update(int(self.lengths[chunk].sum()))
        return stored

    def _compute(self, input_ids: Int[np.ndarray, "b t"], mask: Int[np.ndarray, "b t"]) -> Float[torch.Tensor, "b t n"]:
        device = self.model.device
        texts = [torch.from_numpy(values).to(device) for values in (input_ids, mask)]
        with in_precision(self.precision, device), known_positions():
            return self.model.base_states(*texts)


def prepare_states(
    model: RewardModel, parts: list[RewardData], cache: str | None, base_fingerprint: str, precision: str
) -> list[StateCache]:
    """Find the states of data sets, which are still to be made; refuse to begin if the disk is too small.

    Parts of one data set share their states.
    """
    folder = Path(cache or default_cache_folder()) / "states"
    caches: dict[Path, StateCache] = {}
    for part in parts:
        states = StateCache(model, part, folder, base_fingerprint, precision)
        if states.folder in caches:
            caches[states.folder].parts.append(part)
        else:
            caches[states.folder] = states
    hint = "make room, name a folder on another disk by --cache, or leave --cache-states out"
    hint += "; fewer --readout-layers and --backbone-dtype bfloat16 need less."
    check_room(folder, (piece for states in caches.values() for piece in states.pieces()), "the hidden states", hint)
    return list(caches.values())


def measure_states(caches: list[StateCache]) -> dict[str, float]:
    """The number of tokens per second whose states were computed; no metrics if all were stored before."""
    number, seconds = sum(cache.num_computed for cache in caches), sum(cache.seconds for cache in caches)
    return {"state_tokens_per_second": round(number / seconds)} if number else {}


# --- a teacher's rewards ---


def cache_targets(
    folder: Path, data: RewardData, teacher: Teacher, fingerprint: str, batch_size: int, progress: bool
) -> None:
    """Store the teacher's rewards of all tokens of these rows, unless they are stored, and let the data read them.

    The name of the file is made of the fingerprints of teacher and rows, so that a file never serves others.
    """
    shape = len(data.token_ids), len(teacher.attributes)
    size = TARGET_BYTES * math.prod(shape)
    piece = StoredPiece(folder / f"{fingerprint_values(fingerprint, data.fingerprint)}.bin", data, size)
    if not piece.is_made:
        online = "" if teacher.is_slow else ", or compute them in every step (--online)"
        check_room(folder, [piece], "the teacher's rewards", f"make room on the disk{online}.")
        with piece.writing() as temporary:
            _write_targets(temporary, size, data, teacher, batch_size, progress)
    data.targets = np.memmap(piece.file, np.float32, "r", shape=shape)


@torch.no_grad()
def _write_targets(file: Path, size: int, data: RewardData, teacher: Teacher, batch_size: int, progress: bool) -> None:
    """Write the rewards of each row at the place of its tokens; rows outside `data` stay holes in the file.

    These are plain writes, since a full disk under a memory-mapped file would crash the process.
    """
    token_bytes = TARGET_BYTES * len(teacher.attributes)
    order = np.argsort(data.lengths, kind="stable")
    chunks = np.array_split(order, -(-len(order) // batch_size))
    with file.open("wb") as stream:
        stream.truncate(size)
        for chunk in tqdm(chunks, desc="rewards of the teacher", unit="batch", disable=not progress):
            batch = data.batch(chunk.tolist())
            read = batch["loss_mask" if teacher.reads_continuations else "attention_mask"]
            rewards = teacher.token_rewards(batch["input_ids"].to(teacher.device), read.to(teacher.device))
            rewards = rewards.float().cpu().numpy()
            lengths = batch["attention_mask"].sum(1).tolist()
            for row, length, reward in zip(batch["rows"].tolist(), lengths, rewards, strict=True):
                stream.seek(token_bytes * int(data.offsets[row]))
                stream.write(reward[:length].tobytes())


def target_ranges(data: RewardData) -> list[Limits]:
    """The lowest and the highest target of each attribute, over the tokens that the loss is about."""
    assert data.targets is not None
    starts = data.offsets[data.rows] + data.prompt_lengths[data.rows]
    parts = [data.targets[start:end] for start, end in zip(starts, data.offsets[data.rows + 1], strict=True)]
    ends = [(part.min(0), part.max(0)) for part in parts if len(part)]  # (a,) each
    lows, highs = (np.array(values) for values in zip(*ends, strict=True))
    return list(zip(lows.min(0).tolist(), highs.max(0).tolist(), strict=True))
