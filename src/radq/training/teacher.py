"""The teacher of a distillation: reward models, guides or judges of texts, whose rewards the student learns.

    teacher = load_teacher("reward-a,reward-b")
    teacher.candidate_rewards(input_ids, attention_mask, candidates)

A teacher has one or more members, and its reward is the mean of theirs; members with other ranges than the first are
mapped to its range before. Axes: b batch, t time, p positions, k candidates, a attributes, m members, n texts.
"""

import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from radq.data.dataset import RewardData
from radq.decoding.text import UNFINISHED
from radq.errors import OptionError, VocabularyError
from radq.files import fingerprint_tensors, fingerprint_values
from radq.guides.base import Guide, ReadsOnce
from radq.guides.folders import holds_experts, read_codes
from radq.guides.spec import GuideSpec
from radq.judges.base import CachedJudge, Judge
from radq.judges.models import load_classifier
from radq.models.loading import find_device
from radq.models.reward import RewardModel
from radq.models.vocabulary import Vocabulary
from radq.sources.model_source import require_attributes
from radq.training.config import RewardTrainingConfig
from radq.training.run_folder import find_reward_models, split_teachers
from radq.training.trainer_setup import in_precision

Limits = tuple[float, float]
Texts = Int[Tensor, "b t"]  # their token ids, or a mask
Tokens = Int[Tensor, "b k"]  # candidates for the next token of each text
Columns = Int[Tensor, "b p"]
Places = Int[Tensor, "b p k"]  # candidates in place of the tokens in these columns
Rewards = Float[Tensor, "b p k a"]


class Source(nn.Module):
    """A source of rewards, for one or more attributes."""

    reads_continuations = False  # whether it reads texts without their prompts
    is_slow = False  # whether the rewards of a text's tokens take a forward pass for each token
    reads_once = False  # whether `place_rewards` reads each text once
    attributes: list[str]
    ranges: list[Limits] | None  # of the rewards of each attribute; None if nothing is known about them
    label_scales: list[dict[str, Any]] | None  # how the labels that it was trained on became numbers; None if unknown
    vocabularies: list[Vocabulary]  # of the models
    context: int | None  # the largest number of tokens of a text that can be read; None if there is no limit
    metrics: dict[str, float] = {}  # noqa: RUF012 - of the speed of sources that read texts

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A fingerprint of all that the rewards depend on; the places of folders do not count."""

    @abstractmethod
    def token_rewards(self, input_ids: Texts, attention_mask: Texts) -> Float[Tensor, "b t a"]:
        """Compute the reward of every token of a batch of texts, which are padded on the right."""

    @abstractmethod
    def candidate_rewards(self, input_ids: Texts, attention_mask: Texts, candidates: Tokens) -> Float[Tensor, "b k a"]:
        """Compute the rewards of candidates for the next token of each prefix."""

    def place_rewards(self, input_ids: Texts, attention_mask: Texts, positions: Columns, candidates: Places) -> Rewards:
        """Compute the rewards of candidates in place of the tokens at some positions; by default, read each anew."""
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        anew = [
            self.candidate_rewards(input_ids, attention_mask * (columns < place[:, None]), asked)
            for place, asked in zip(positions.T, candidates.unbind(1), strict=True)
        ]
        return torch.stack(anew, dim=1)


@final
class RewardSource(Source):
    """A reward model, or some of its attributes. Its rewards are not clamped."""

    def __init__(self, model: RewardModel, attributes: Sequence[str] = ()):
        super().__init__()
        require_attributes(attributes, model.config.attributes)
        self.model, self.vocabularies, self.context = model, [model.vocabulary], model.reader.context
        self.attributes = list(attributes) or list(model.config.attributes)
        self._columns = [model.config.attributes.index(name) for name in self.attributes]
        self.ranges = [model.config.attribute_ranges[column] for column in self._columns]
        scales = model.config.label_scales
        self.label_scales = None if scales is None else [scales[column] for column in self._columns]

    @property
    def fingerprint(self) -> str:
        whole = fingerprint_model(self.model)
        return whole if self.attributes == self.model.config.attributes else fingerprint_values(whole, self._columns)

    @property
    def reads_once(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.model.reads_once

    def token_rewards(self, input_ids: Texts, attention_mask: Texts) -> Float[Tensor, "b t a"]:
        return self._choose(self.model.token_rewards(input_ids, attention_mask))

    def candidate_rewards(self, input_ids: Texts, attention_mask: Texts, candidates: Tokens) -> Float[Tensor, "b k a"]:
        return self._choose(self.model.next_rewards(input_ids, attention_mask, candidates))

    def place_rewards(self, input_ids: Texts, attention_mask: Texts, positions: Columns, candidates: Places) -> Rewards:
        return self._choose(self.model.place_rewards(input_ids, attention_mask, positions, candidates))

    def _choose(self, rewards: Float[Tensor, "*p m"]) -> Float[Tensor, "*p a"]:
        if self._columns == list(range(rewards.shape[-1])):  # an index would make a captured step wait for its copy
            return rewards
        return torch.stack([rewards[..., column] for column in self._columns], dim=-1)


@final
class GuideSource(Source):
    """A guide. Its rewards are the numbers that its strengths multiply.

    These are log-ratios of experts, or log-probabilities of a class. The attributes of a student have the names of the
    strengths, such as alpha, and the same meaning.
    """

    def __init__(self, guide: Guide, attributes: Sequence[str], settings: Sequence[Any] = ()):
        """`settings` are all other values than weights that the rewards depend on, for the fingerprint."""
        super().__init__()
        self.guide, self.attributes, self.settings = guide, list(attributes), settings
        self.ranges = self.label_scales = None
        self.vocabularies, self.context = [reader.vocabulary for reader in guide.readers], guide.context
        self.models = nn.ModuleList([reader.model for reader in guide.readers])
        self.reads_once = isinstance(guide, ReadsOnce)
        self.is_slow = not self.reads_once

    @property
    def fingerprint(self) -> str:
        weights = fingerprint_tensors(sorted(self.models.state_dict().items()))
        return fingerprint_values(type(self.guide).__name__, self.attributes, self.settings, weights)

    def token_rewards(self, input_ids: Texts, attention_mask: Texts) -> Float[Tensor, "b t a"]:
        everywhere = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        rewards = self.place_rewards(input_ids, attention_mask, everywhere, input_ids[..., None])  # (b, t, 1, a)
        return rewards[:, :, 0] * attention_mask[..., None]

    def place_rewards(self, input_ids: Texts, attention_mask: Texts, positions: Columns, candidates: Places) -> Rewards:
        if isinstance(self.guide, ReadsOnce):
            return self.guide.place_rewards(input_ids, attention_mask, positions, candidates)
        return super().place_rewards(input_ids, attention_mask, positions, candidates)

    @torch.no_grad()
    def candidate_rewards(self, input_ids: Texts, attention_mask: Texts, candidates: Tokens) -> Float[Tensor, "b k a"]:
        advice = self.guide.advise(self.guide.start(input_ids, attention_mask), candidates)
        if advice.rewards is None:
            raise OptionError("this guide does not tell what its strengths multiply.", "choose another teacher.")
        return torch.cat(list(advice.rewards), dim=-1)


@final
class Teacher(nn.Module):
    """The mean of members, each of which consists of sources for different attributes."""

    factors: Tensor | None  # (m, a): the numbers by which the rewards of members are multiplied to share one range,
    offsets: Tensor | None  # (m, a): and those added then; None if all members have one range

    def __init__(self, members: Sequence[Sequence[Source]]):
        super().__init__()
        self.members = [list(member) for member in members]
        self.sources = [source for member in self.members for source in member]
        self.readers = nn.ModuleList(self.sources)  # known to torch, which knows no lists
        named = [[name for source in member for name in source.attributes] for member in members]
        for names in named[1:]:
            if names != named[0]:
                raise OptionError(
                    f"one teacher has the attributes {', '.join(named[0])}, another {', '.join(names)}.",
                    "choose teachers with the same attributes, in the same order.",
                )
        self.attributes = named[0]
        self.context = min((source.context for source in self.sources if source.context is not None), default=None)
        self.is_slow = any(source.is_slow for source in self.sources)
        vocabularies = [vocabulary for source in self.sources for vocabulary in source.vocabularies]
        self.num_known = min((vocabulary.num_known for vocabulary in vocabularies), default=sys.maxsize)
        self.reads_continuations = any(source.reads_continuations for source in self.sources)
        self.member_ranges = _join([[source.ranges for source in member] for member in self.members])
        self.ranges = None if self.member_ranges is None else self.member_ranges[0]
        scales = _join([[source.label_scales for source in member] for member in self.members])
        self.label_scales = scales[0] if scales is not None and all(part == scales[0] for part in scales) else None
        factors = offsets = None
        if self.member_ranges is not None and any(ranges != self.ranges for ranges in self.member_ranges):
            lows, highs = torch.tensor(self.member_ranges).unbind(-1)  # (m, a) each
            widths = highs - lows
            factors = torch.where(widths > 0, widths[0] / widths, 1)
            offsets = lows[0] - lows * factors
        self.register_buffer("factors", factors, persistent=False)
        self.register_buffer("offsets", offsets, persistent=False)

    @property
    def model(self) -> RewardModel | None:
        """The reward model, if the teacher is a single one with all its attributes; else None."""
        first = self.sources[0]
        if len(self.sources) > 1 or not isinstance(first, RewardSource):
            return None
        return first.model if first.attributes == first.model.config.attributes else None

    @property
    def device(self) -> torch.device:
        """The device of its models; the CPU if it only reads texts, which it does on a device of its own choice."""
        first = next(self.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def computing_in(self, precision: str) -> AbstractContextManager[Any]:
        """Let its models compute in a precision of training; readers of texts keep their own."""
        has_models = next(self.parameters(), None) is not None
        return in_precision(precision, self.device) if has_models else nullcontext()

    def describe_ranges(self) -> str:
        """Say that members have different ranges, and what becomes of them; an empty text if they have one."""
        if self.factors is None:
            return ""
        each = self.member_ranges or ()
        shown = (", ".join(f"{low:.4g} to {high:.4g}" for low, high in ranges) for ranges in each)
        return f"the teachers' rewards have different ranges ({'; '.join(shown)}): all are mapped to that of the first"

    @property
    def reads_once(self) -> bool:
        """Whether one forward over a text gives the rewards of candidates at all its positions."""
        return all(source.reads_once for source in self.sources)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for source in self.sources for name, value in source.metrics.items()}

    @property
    def fingerprint(self) -> str:
        parts = [[source.fingerprint for source in member] for member in self.members]
        if len(self.sources) == 1:
            return parts[0][0]
        return fingerprint_values(parts, *([] if self.factors is None else [self.member_ranges]))

    def token_rewards(self, input_ids: Texts, attention_mask: Texts) -> Float[Tensor, "b t a"]:
        return self._mean(lambda source: source.token_rewards(input_ids, attention_mask))

    def candidate_rewards(self, input_ids: Texts, attention_mask: Texts, candidates: Tokens) -> Float[Tensor, "b k a"]:
        return self._mean(lambda source: source.candidate_rewards(input_ids, attention_mask, candidates))

    def place_rewards(self, input_ids: Texts, attention_mask: Texts, positions: Columns, candidates: Places) -> Rewards:
        return self._mean(lambda source: source.place_rewards(input_ids, attention_mask, positions, candidates))

    def _mean(self, score: Callable[[Source], Float[Tensor, "*p m"]]) -> Float[Tensor, "*p a"]:
        """Put the rewards of a member's sources side by side, and take the mean of all members."""
        rewards = [torch.cat([score(source) for source in member], dim=-1) for member in self.members]
        if self.factors is not None and self.offsets is not None:
            rewards = [part * self.factors[n] + self.offsets[n] for n, part in enumerate(rewards)]
        return torch.stack(rewards).mean(0)


def _join(members: list[list[list[Any] | None]]) -> list[list[Any]] | None:
    """Put what the sources of each member tell of their attributes side by side; None if one of them does not know."""
    if any(part is None for member in members for part in member):
        return None
    return [[item for part in member for item in part or ()] for member in members]


def load_teacher(text: str) -> Teacher:
    """Load a teacher that is written as text: folders or guides, separated by commas."""
    members: list[list[Source]] = []
    for name in split_teachers(text):
        models = find_reward_models(name)
        if models is not None:
            loaded = ((RewardModel.from_pretrained(folder), attributes) for folder, attributes in models)
            members.append([RewardSource(model, attributes) for model, attributes in loaded])
            continue
        guide = GuideSpec.parse(name)
        options = {option: guide.numbers[option] for option in guide.kind.options if option in guide.numbers}
        strengths = [strength for strength in guide.numbers if strength not in options]
        codes = None if holds_experts(guide.folder) else read_codes(guide.folder)
        members.append([GuideSource(guide.load(), strengths, [options, codes])])
    return Teacher(members)


def check_teacher(teacher: Teacher, student: RewardModel, teacher_name: str, student_name: str) -> None:
    """Refuse a teacher with other attributes or another vocabulary than the student."""
    if teacher.attributes != student.config.attributes:
        raise OptionError(
            f"the teacher's attributes are {', '.join(teacher.attributes)}, "
            f"the student's {', '.join(student.config.attributes)}.",
            "leave --labels out, or name the teacher's attributes.",
        )
    if any(vocabulary != student.vocabulary for source in teacher.sources for vocabulary in source.vocabularies):
        raise VocabularyError(
            f"the vocabulary of the teacher {teacher_name!r} is not that of {student_name!r}.",
            "choose a student and a teacher with the same tokenizer.",
        )


def fingerprint_model(model: RewardModel) -> str:
    """Compute a fingerprint of all that a reward model's rewards depend on; the place of its folder does not count."""
    config = model.config
    settings: list[Any] = [config.attributes, config.loss, config.prepend_bos, config.bos_token_id]
    if model.readout is not None:
        settings.append(model.readout.layers)  # no weight tells their numbers
    backbone: Any = config.backbone
    irrelevant = ("_name_or_path", "transformers_version", "dtype")
    shape = {name: value for name, value in backbone.to_dict().items() if name not in irrelevant}
    return fingerprint_values(settings, shape, fingerprint_tensors(sorted(model.state_dict().items())))


# --- judges of texts ---


@final
class TextSource(Source):
    """Judges of texts, one for each attribute, which read what the student's tokenizer decodes.

    With `reads_continuations`, callers pass tokens or masks without prompts.
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
        self.truncated = 0  # texts that were longer than the judges can read
        self._fingerprint = fingerprint_values(
            [judge.name for judge in judges], self.attributes, self.reads_continuations
        )

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def metrics(self) -> dict[str, float]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The texts per second that it has scored, if not all scores were known, and how many were too long for it."""
        if not self.num_texts:
            return {}
        return {"teacher_texts_per_second": self.num_texts / self.seconds, "teacher_truncated": self.truncated}

    def release(self) -> None:
        """Forget the judges and their memory, when all texts are scored."""
        self.judges = []

    def score_texts(self, texts: Sequence[str], progress: bool = False) -> Float[np.ndarray, "n a"]:
        """The scores of texts; NaN for blank ones."""
        began, known = time.perf_counter(), self.judges[0].kept
        scores = np.stack([judge.score(texts, progress) for judge in self.judges], axis=1)
        self.truncated = max(judge.truncated for judge in self.judges)
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
