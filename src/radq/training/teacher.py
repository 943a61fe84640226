"""The teacher of a distillation: a RAD-V whose rewards a RAD-Q, the student, learns."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from radq.data.dataset import RewardData
from radq.errors import OptionError, VocabularyError
from radq.files import explained_writing, fingerprint_tensors, fingerprint_values, whole_file
from radq.models.reward import RewardModel

TARGET_BYTES = 4  # targets are stored in float32


def check_teacher(teacher: RewardModel, student: RewardModel, teacher_name: str, student_name: str) -> None:
    """Refuse a teacher with other attributes or another vocabulary than the student."""
    if teacher.config.attributes != student.config.attributes:
        raise OptionError(
            f"the teacher's attributes are {', '.join(teacher.config.attributes)}, "
            f"the student's {', '.join(student.config.attributes)}.",
            "leave --labels out, or name the teacher's attributes.",
        )
    if teacher.vocabulary != student.vocabulary:
        raise VocabularyError(
            f"the vocabulary of the teacher {teacher_name!r} is not that of {student_name!r}.",
            "choose a student and a teacher with the same tokenizer.",
        )


def fingerprint_teacher(teacher: RewardModel) -> str:
    """Fingerprint of all that the teacher's rewards depend on; the place of its folder does not count."""
    settings = [teacher.config.attributes, teacher.config.loss, teacher.config.prepend_bos, teacher.config.bos_token_id]
    backbone: Any = teacher.config.backbone
    irrelevant = ("_name_or_path", "transformers_version", "dtype")
    shape = {name: value for name, value in backbone.to_dict().items() if name not in irrelevant}
    return fingerprint_values(settings, shape, fingerprint_tensors(sorted(teacher.state_dict().items())))


def cache_targets(
    folder: Path, data: RewardData, teacher: RewardModel, fingerprint: str, batch_size: int, progress: bool
) -> Path:
    """Store the teacher's rewards of all tokens of these rows in a file, unless the file is there already.

    The name of the file is made of the fingerprints of teacher and rows, so that a file never serves others.
    """
    file = folder / f"{fingerprint_values(fingerprint, data.fingerprint)}.bin"
    shape = target_shape(data, teacher)
    if not file.exists() or file.stat().st_size != TARGET_BYTES * shape[0] * shape[1]:
        with explained_writing(file), whole_file(file) as temporary:
            _write_targets(temporary, data, teacher, batch_size, progress)
    return file


def target_shape(data: RewardData, teacher: RewardModel) -> tuple[int, int]:
    """Shape of the targets: number of tokens of all rows, and number of attributes."""
    return len(data.token_ids), len(teacher.config.attributes)


@torch.no_grad()
def _write_targets(file: Path, data: RewardData, teacher: RewardModel, batch_size: int, progress: bool) -> None:
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
            input_ids, attention_mask = (batch[name].to(teacher.device) for name in ("input_ids", "attention_mask"))
            rewards = teacher.token_rewards(input_ids, attention_mask).float().cpu().numpy()
            lengths = attention_mask.sum(1).tolist()
            for row, length, found in zip(batch["rows"].tolist(), lengths, rewards, strict=True):
                stream.seek(TARGET_BYTES * a * int(data.offsets[row]))
                stream.write(found[:length].tobytes())
