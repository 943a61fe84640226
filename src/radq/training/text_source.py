"""Rewards by judges that read texts, such as a classifier with a tokenizer of its own.

    source = TextSource(load_classifier("FOLDER:toxic"), tokenizer)
    Teacher([[source]]).candidate_rewards(input_ids, attention_mask, candidates)

Token ids are decoded with the tokenizer of the student. The reward of a token is the score of the text that ends with
it. Scores are kept on disk, so that an interrupted run does not score a text again. Axes: b batch, t time, k
candidates, a attributes, n texts.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import RewardData
from radq.decoding.text import UNFINISHED
from radq.files import fingerprint_values
from radq.judges.base import CachedJudge, Judge
from radq.judges.classifiers import load_classifier
from radq.models.loading import find_device
from radq.training.config import RewardTrainingConfig
from radq.training.teacher import Source, Teacher, Texts


@final
class TextSource(Source):
    """Judges of texts, one for each attribute.

    Args:
        tokenizer: that of the student, whose token ids are decoded.
        reads_continuations: whether prompts are left out; callers then pass tokens or masks without them.
        cache: folder in which scores are kept; by default in the user's cache.
    """

    is_slow = True

    def __init__(
        self,
        judges: Sequence[Judge],
        tokenizer: PreTrainedTokenizerBase,
        reads_continuations: bool = False,
        cache: str | Path | None = None,
    ):
        super().__init__()
        self.judges = [CachedJudge(judge, cache) for judge in judges]
        self.tokenizer, self.reads_continuations = tokenizer, reads_continuations
        self.attributes = [judge.attribute for judge in judges]
        limits = [judge.limits for judge in judges]
        self.ranges = limits if np.isfinite(limits).all() else None
        self.label_scales = self.context = None
        self.vocabularies = []
        self.seconds, self.num_texts = 0.0, 0  # spent on texts that were not known
        self._truncated = 0
        self._fingerprint = fingerprint_values(
            [judge.name for judge in judges], self.attributes, self.reads_continuations
        )

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def texts_per_second(self) -> float | None:
        """How many texts a second it has scored; None if all scores were known."""
        return self.num_texts / self.seconds if self.num_texts else None

    @property
    def truncated(self) -> int:
        """The number of texts that were longer than the judges can read."""
        return max((judge.truncated for judge in self.judges), default=self._truncated)

    def release(self) -> None:
        """Forget the judges and their memory, when all texts are scored."""
        self._truncated, self.judges = self.truncated, []

    def score_texts(self, texts: Sequence[str], progress: bool = False) -> Float[np.ndarray, "n a"]:
        """The scores of texts; NaN for blank ones."""
        began, known = time.perf_counter(), self.judges[0].kept
        scores = np.stack([judge.score(texts, progress) for judge in self.judges], axis=1)
        unknown = len(texts) - (self.judges[0].kept - known)
        if unknown:
            self.seconds += time.perf_counter() - began
            self.num_texts += unknown
        return scores

    def score_data(self, data: RewardData, progress: bool = False) -> Float[np.ndarray, "n a"]:
        """The scores of all texts of a data set, as they were tokenised; blank ones have the mean score."""
        starts = data.offsets[:-1] + (data.prompt_lengths if self.reads_continuations else 0)
        rows = [data.token_ids[start:end].tolist() for start, end in zip(starts, data.offsets[1:], strict=True)]
        return fill_blanks(self.score_texts(self._decode(rows), progress)[:, None])[:, 0]

    @torch.no_grad()
    def token_rewards(self, input_ids: Texts, attention_mask: Texts) -> Float[Tensor, "b t a"]:
        (b, t), rows, places = input_ids.shape, [], []
        for n, (ids, mask) in enumerate(zip(input_ids.tolist(), attention_mask.tolist(), strict=True)):
            columns = [column for column in range(t) if mask[column]]
            rows += [[ids[column] for column in columns[: length + 1]] for length in range(len(columns))]
            places += [n * t + column for column in columns]
        scores = np.full((b * t, len(self.attributes)), np.nan)
        scores[places] = self.score_texts(self._decode(rows))
        return torch.from_numpy(fill_blanks(scores.reshape(b, t, -1))).float() * attention_mask[..., None]

    @torch.no_grad()
    def candidate_rewards(
        self, input_ids: Texts, attention_mask: Texts, candidates: Int[Tensor, "b k"]
    ) -> Float[Tensor, "b k a"]:
        prefixes = [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        pairs = zip(prefixes, candidates.tolist(), strict=True)
        texts = self._decode([[*prefix, token] for prefix, tokens in pairs for token in tokens])
        scores = self.score_texts(texts).reshape(*candidates.shape, -1)
        return torch.from_numpy(fill_blanks(scores)).float()

    def _decode(self, rows: list[list[int]]) -> list[str]:
        """The texts of token ids; the first bytes of a character that is not complete are left out."""
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [text.rstrip(UNFINISHED) for text in texts]


def fill_blanks(scores: Float[np.ndarray, "b n a"]) -> Float[np.ndarray, "b n a"]:
    """Give blank texts, whose scores are NaN, the mean of the other texts of their row, so that they change nothing.

    In a row of blank texts alone it is the mean of all rows, and 0 where there is no score at all.
    """
    known = ~np.isnan(scores)
    filled = np.where(known, scores, 0)
    overall = filled.sum((0, 1)) / known.sum((0, 1)).clip(min=1)  # (a,)
    counts = known.sum(1, keepdims=True)
    means = np.where(counts > 0, filled.sum(1, keepdims=True) / counts.clip(min=1), overall)  # (b, 1, a)
    return np.where(known, scores, means)


def load_text_teacher(config: RewardTrainingConfig, tokenizer: PreTrainedTokenizerBase) -> Teacher:
    """Load the classifier that teaches, on a GPU if there is one. `tokenizer` is that of the student."""
    judges = load_classifier(config.teacher_classifier, find_device("auto"))
    return Teacher([[TextSource(judges, tokenizer, config.teacher_reads == "continuation", config.cache)]])


def label_data(
    teacher: Teacher, data: RewardData, eval_data: RewardData | None, config: RewardTrainingConfig, progress: bool
) -> tuple[RewardData, RewardData | None]:
    """Make the scores of whole texts their labels, in the rows to train on and in those to evaluate on."""
    (source,) = teacher.sources
    assert isinstance(source, TextSource)
    scores = {part.folder: part for part in (data, eval_data) if part is not None}  # two parts may share their texts
    scores = {folder: source.score_data(part, progress) for folder, part in scores.items()}
    if not config.base:
        source.release()
    labelled = eval_data if eval_data is None else eval_data.with_labels(scores[eval_data.folder])
    return data.with_labels(scores[data.folder]), labelled


def measure_teacher(teacher: Teacher | None) -> dict[str, float]:
    """The speed of a teacher that reads texts, and the number of texts that were too long for it."""
    found: dict[str, float] = {}
    for source in [] if teacher is None else teacher.sources:
        if isinstance(source, TextSource) and source.texts_per_second is not None:
            found |= {"teacher_texts_per_second": source.texts_per_second, "teacher_truncated": source.truncated}
    return found
