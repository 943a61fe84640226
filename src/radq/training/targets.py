"""The teacher's rewards of all tokens of a data set, computed once and stored in a file of the run folder."""

import math
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from radq.data.dataset import RewardData
from radq.files import fingerprint_values, require_room
from radq.store.pieces import Piece
from radq.training.teacher import Limits, Teacher

TARGET_BYTES = 4  # targets are stored in float32


def cache_targets(
    folder: Path, data: RewardData, teacher: Teacher, fingerprint: str, batch_size: int, progress: bool
) -> Path:
    """Store the teacher's rewards of all tokens of these rows in a file, unless the file is there already.

    The name of the file is made of the fingerprints of teacher and rows, so that a file never serves others.
    """
    size = TARGET_BYTES * math.prod(target_shape(data, teacher))
    piece = Piece(folder / f"{fingerprint_values(fingerprint, data.fingerprint)}.bin", data, size)
    if not piece.is_made:
        online = "" if teacher.is_slow else ", or compute them in every step (--online)"
        require_room(folder, size, "the teacher's rewards", f"make room on the disk{online}.")
        with piece.writing() as temporary:
            _write_targets(temporary, data, teacher, batch_size, progress)
    return piece.file


def target_shape(data: RewardData, teacher: Teacher) -> tuple[int, int]:
    """Return the number of tokens of all rows and the number of attributes, which are the shape of the targets."""
    return len(data.token_ids), len(teacher.attributes)


@torch.no_grad()
def _write_targets(file: Path, data: RewardData, teacher: Teacher, batch_size: int, progress: bool) -> None:
    """Write the rewards of each row at the place of its tokens; rows outside `data` stay holes in the file.

    These are plain writes, since a full disk under a memory-mapped file would crash the process.
    """
    num_tokens, a = target_shape(data, teacher)
    order = np.argsort(data.lengths, kind="stable")
    chunks = np.array_split(order, -(-len(order) // batch_size))
    with file.open("wb") as stream:
        stream.truncate(TARGET_BYTES * num_tokens * a)
        for chunk in tqdm(chunks, desc="rewards of the teacher", unit="batch", disable=not progress):
            batch = data.batch(chunk.tolist())
            read = batch["loss_mask" if teacher.reads_continuations else "attention_mask"]
            rewards = teacher.token_rewards(batch["input_ids"].to(teacher.device), read.to(teacher.device))
            rewards = rewards.float().cpu().numpy()
            lengths = batch["attention_mask"].sum(1).tolist()
            for row, length, found in zip(batch["rows"].tolist(), lengths, rewards, strict=True):
                stream.seek(TARGET_BYTES * a * int(data.offsets[row]))
                stream.write(found[:length].tobytes())


def target_ranges(data: RewardData) -> list[Limits]:
    """The lowest and the highest target of each attribute, over the tokens that the loss is about."""
    assert data.targets is not None
    starts = data.offsets[data.rows] + data.prompt_lengths[data.rows]
    parts = [data.targets[start:end] for start, end in zip(starts, data.offsets[data.rows + 1], strict=True)]
    ends = [(part.min(0), part.max(0)) for part in parts if len(part)]  # (a,) each
    lows, highs = (np.array(values) for values in zip(*ends, strict=True))
    return list(zip(lows.min(0).tolist(), highs.max(0).tolist(), strict=True))
