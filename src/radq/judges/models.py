"""The kinds of judges, and `load_judge`, which loads one from a text such as "classifier:FOLDER#label".

A new kind of judge is a subclass of `Judge` here, a function that loads it, and a line in the table `JUDGES`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from radq.decoding.best_of_n import score_texts
from radq.errors import ModelError, OptionError
from radq.judges.base import Judge, Scored
from radq.judges.classifiers import choose_label, choose_labels, find_link, holds_onnx, parse_classifier
from radq.judges.function import FunctionJudge
from radq.judges.linear import LinearModel
from radq.judges.llm import load_rubric_judge
from radq.judges.readers import (
    BATCH_SIZE,
    GROUP_SIZE,
    Encoder,
    OnnxReader,
    RememberingReader,
    TextReader,
    TransformersReader,
    load_encoder,
)
from radq.models.reward import RewardModel
from radq.numerics import same_kernels
from radq.sources.embedded import EMBEDDED, judge_folder
from radq.sources.model_source import ModelSource

GPU_BATCH_SIZE = 4096  # a GPU is fast with many short texts at once


@final
class ClassifierJudge(Judge):
    """The probability of one label of a classifier, or the value of one output of a regression.

    A probability is the sigmoid of the label's logit where the model has one logit or independent labels, else the
    softmax.
    """

    def __init__(self, kind: str, reader: TextReader, label: str | None, attribute: str | None = None):
        self.reader, self.counts, self.group_size = reader, reader.counts, reader.group_size
        labels = find_outputs(reader)
        if label is None and not reader.labels and len(labels) == 2:
            label = labels[-1]  # the outputs of a binary classifier without names are no and yes
        self.index = choose_label(labels, label, reader.name)
        self.attribute = attribute or labels[self.index]
        self.name = f"{kind}:{reader.name}#{labels[self.index]}"
        self.link = find_link(reader.problem_type, len(labels))
        if self.link == "identity":
            self.name += "/regression"
            self.limits = (-np.inf, np.inf)

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        positions, scores = [], []
        for some, logits, _ in self.reader.read(texts):
            positions.extend(some)
            scores.extend(LINKS[self.link](logits.double())[:, self.index].cpu().numpy())
            if len(positions) >= BATCH_SIZE:
                yield positions, np.array(scores)
                positions, scores = [], []
        if positions:
            yield positions, np.array(scores)


def find_outputs(reader: TextReader) -> list[str]:
    """The labels of a classifier's outputs, or their numbers if they have no names; other models are refused."""
    logits = next(reader.read(["a"]))[1]
    if logits.dim() != 2:
        raise ModelError(
            f"{reader.name} is no classifier: its outputs have the shape {tuple(logits.shape)}.",
            "give a model with one row of logits per text.",
        )
    labels = reader.labels or [str(n) for n in range(logits.shape[1])]
    if len(labels) != logits.shape[1]:
        raise ModelError(
            f"{reader.name} has {logits.shape[1]} outputs, but {len(labels)} labels.",
            "name one label per output under id2label in its config.json.",
        )
    return labels


LINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "identity": lambda logits: logits,
}


@final
class LinearJudge(Judge):
    """A logistic regression on sentence embeddings, as `radq judge train` writes it."""

    def __init__(self, folder: str | Path, device: str = "cpu", encoder: Encoder | None = None):
        self.model = LinearModel.load(folder)
        self.encoder = encoder or load_encoder(self.model.card.encoder, device)  # several judges may share one encoder
        if self.encoder.name != self.model.card.encoder_name:
            raise ModelError(
                f"{str(folder)!r} was fitted on the encoder {self.model.card.encoder_name}, "
                f"but {self.model.card.encoder!r} is now {self.encoder.name}.",
                "restore that encoder, or train the judge again.",
            )
        self.attribute = self.model.card.label
        self.name = f"linear:{Path(folder).resolve().name}@{self.model.digest()}"
        self.counts, self.group_size = self.encoder.reader.counts, self.encoder.reader.group_size

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        for first in range(0, len(texts), GROUP_SIZE):
            some = texts[first : first + GROUP_SIZE]
            yield range(first, first + len(some)), self.model.probabilities(self.encoder.encode(some))


@final
class RewardJudge(Judge):
    """A reward model at the last token of a text, clamped to [0, 1]; longer texts are judged by their beginning.

        radq train --kind v --backbone embedded --data scored.jsonl --labels toxicity --out judge-toxicity
        radq judge score "…" --judge reward:judge-toxicity

    At its last token, RAD-V is a regression of the labels with a whole backbone. Train it on other data than the reward
    model that steers.
    """

    group_size = GROUP_SIZE

    def __init__(self, folder: str, attribute: str | None, device: str = "cpu"):
        source = ModelSource.find(folder)
        self.model = RewardModel.from_pretrained(source, device, dtype=torch.float32)
        if self.model.tokenizer is None:
            raise ModelError(f"{folder!r} has no tokenizer.", "put the files of its tokenizer into the folder.")
        self.tokenizer = self.model.tokenizer
        attributes = self.model.config.attributes
        self.attribute = attributes[choose_label(attributes, attribute, folder)]
        self.name = f"reward:{source.identity}#{self.attribute}"

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        rows = self.tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids if texts else []
        limit = self.model.reader.context
        self.counts["truncated"] += sum(limit is not None and len(row) > limit for row in rows)
        by_length = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
        size = BATCH_SIZE if self.model.device.type == "cpu" else GPU_BATCH_SIZE
        for first in range(0, len(rows), size):
            positions = by_length[first : first + size]
            with _tensor_cores(), same_kernels():
                scores = score_texts(self.model, {self.attribute: 1.0}, [rows[n][:limit] for n in positions], size)
            yield positions, scores.clamp(0, 1).numpy()


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """Multiply float32 matrices in TF32 where the hardware has it: three digits are enough for a judge."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@final
class MappedJudge(Judge):
    """The scores of another judge, which must have a lowest and a highest score, mapped by a function."""

    def __init__(self, judge: Judge, change: Callable[[np.ndarray], np.ndarray]):
        if not np.isfinite(judge.limits).all():
            raise OptionError(
                f"the judge {judge.name} is a regression, whose scores have no lowest and highest value.",
                "write its scores into a table with `radq judge score`, and train a judge or a reward model on them.",
            )
        self.inner, self.change = judge, change
        self.name, self.attribute = judge.name, judge.attribute
        self.counts, self.group_size = judge.counts, judge.group_size

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        for positions, scores in self.inner.judge(texts):
            yield positions, self.change(scores)


def to_unit(judge: Judge) -> Judge:
    """Map the scores of a judge to 0 to 1, which metrics need."""
    low, high = judge.limits
    return MappedJudge(judge, lambda scores: (scores - low) / (high - low))


def invert(judge: Judge) -> Judge:
    """Score the absence of an attribute: 1 − the score of a judge.

    On a scale other than 0 to 1, it is the score that lies as far from the highest as the other does from the lowest.
    """
    low, high = judge.limits
    inverted = MappedJudge(judge, lambda scores: low + high - scores)
    inverted.name, inverted.attribute, inverted.limits = f"not:{judge.name}", f"not_{judge.attribute}", judge.limits
    return inverted


# --- judges as text ---


def load_judge(specification: str, device: str = "cpu") -> Judge:
    """Load a judge from a text `KIND:SOURCE`, where KIND is a name in `JUDGES`."""
    kind, _, source = specification.partition(":")
    if kind not in JUDGES:
        raise OptionError(f"there is no judge {specification!r}.", f"begin with one of {', '.join(JUDGES)}.")
    return JUDGES[kind](source, device)


def load_classifier(text: str, device: str = "cpu") -> list[Judge]:
    """Load a judge for each label that a text names, see `radq.judges.classifiers`; they read every text once."""
    name = parse_classifier(text)
    if name.is_judge:
        judge = load_judge(name.source, device)
        judge.attribute = name.labels[0][1] or judge.attribute
        return [judge]
    kind = "onnx" if holds_onnx(name.source) else "classifier"
    reader = _open_classifier(kind, name.source, device)
    labels = find_outputs(reader)
    if not reader.labels and len(labels) > 1 and name.labels[0][0] is None:
        raise OptionError(
            f"{name.source!r} has {len(labels)} outputs without names, and it is not clear which of them is the "
            "attribute.",
            f"add the number of the one you mean and a name for it, such as :{len(labels) - 1}=toxicity.",
        )
    chosen = choose_labels(name, labels)
    shared = RememberingReader(reader) if len(chosen) > 1 else reader
    return [ClassifierJudge(kind, shared, labels[index], attribute) for index, attribute in chosen]


def _open_classifier(kind: str, source: str, device: str) -> TextReader:
    if kind == "onnx":
        return OnnxReader(source, device)
    return TransformersReader(source, AutoModelForSequenceClassification, device)


def _load_labelled(kind: str, source: str, device: str) -> Judge:
    """Load a classifier of transformers or in ONNX from `NAME_OR_FOLDER[#label or index]`."""
    folder, label = _split_label(kind, source)
    return ClassifierJudge(kind, _open_classifier(kind, folder, device), label)


def _load_linear(source: str, device: str) -> Judge:
    """Load a linear judge from `FOLDER`, or from `embedded:ATTRIBUTE` one that radq brings along."""
    folder, _ = _split_label("linear", source)
    kind, _, attribute = folder.partition(":")
    return LinearJudge(judge_folder(attribute) if kind == EMBEDDED else folder, device)


def _split_label(kind: str, source: str) -> tuple[str, str | None]:
    folder, _, label = source.partition("#")
    if not folder:
        raise OptionError(f"the judge '{kind}:{source}' names no model.", f"name one, such as {kind}:FOLDER.")
    return folder, label or None


JUDGES: dict[str, Callable[[str, str], Judge]] = {
    "classifier": partial(_load_labelled, "classifier"),
    "onnx": partial(_load_labelled, "onnx"),
    "linear": _load_linear,
    "reward": lambda source, device: RewardJudge(*_split_label("reward", source), device),
    "not": lambda source, device: invert(load_judge(source, device)),
    "openai": lambda source, device: load_rubric_judge(source),
    "function": lambda source, device: FunctionJudge(source),
}
