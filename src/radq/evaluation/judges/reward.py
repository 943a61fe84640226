"""A reward model as a judge: RAD-V, trained on other data than the model that steers.

    radq train --kind v --backbone embedded --data perspective.jsonl --labels toxicity --out judge-toxicity
    radq judge score --judge reward:judge-toxicity --text "…"

At a text's last token RAD-V is a regression of the responses with a whole backbone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch

from radq.decoding.best_of_n import score_texts
from radq.errors import ModelError
from radq.evaluation.judges.base import Judge, Scored, choose_label
from radq.evaluation.judges.readers import TOGETHER, identify
from radq.models.reward import RewardModel
from radq.numerics import same_kernels


@final
class RewardJudge(Judge):
    """The reward at the last token, clamped to [0, 1]; longer texts are judged by their beginning."""

    together = TOGETHER

    def __init__(self, folder: str, attribute: str | None, device: str = "cpu"):
        self.model = RewardModel.from_pretrained(folder, device, dtype=torch.float32)
        if self.model.tokenizer is None:
            raise ModelError(f"{folder!r} has no tokenizer.", "put its files into the folder.")
        self.tokenizer = self.model.tokenizer
        attributes = self.model.config.attributes
        self.attribute = attributes[choose_label(attributes, attribute, folder)]
        self.name = f"reward:{identify(folder)}#{self.attribute}"
        self._truncated = 0

    @property
    def truncated(self) -> int:
        return self._truncated

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        rows = self.tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids if texts else []
        limit = self.model.max_tokens
        self._truncated += sum(limit is not None and len(row) > limit for row in rows)
        by_length = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
        size = 64 if self.model.device.type == "cpu" else 4096  # a GPU wants many short texts at once
        for first in range(0, len(rows), size):
            positions = by_length[first : first + size]
            with _tensor_cores(), same_kernels():
                scores = score_texts(self.model, {self.attribute: 1.0}, [rows[n][:limit] for n in positions], size)
            yield positions, scores.clamp(0, 1).numpy()


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """Products of float32 by TF32 where the hardware has it: three digits are more than a judge is good for."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
