"""Judges: text → score in [0, 1], higher for more of the attribute.

    judge = CachedJudge(load_judge("classifier:distilbert-base-uncased-finetuned-sst-2-english", device="cuda"))
    judge.score(["what a lovely film", ""])  # array([0.9998, nan])

A text with nothing but whitespace has no attribute to judge: its score is NaN, whatever the judge. Metrics leave it out
and count it.

What a judge reads is the caller's choice. The paper's toxicity judges read the continuation alone, its sentiment judge
prompt and continuation.

A model that reads many texts in one batch rounds differently in other company: the last digits of a score depend on the
batch. `Judge.together` says so, and `CachedJudge` then keeps each score under the text and its company.
"""

import hashlib
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import final

import numpy as np
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification

from radq.errors import DataError, ModelError, OptionError
from radq.evaluation.judges.encoders import Encoder, load_encoder
from radq.evaluation.judges.linear import LinearModel
from radq.evaluation.judges.readers import BATCH_SIZE, TOGETHER, OnnxReader, Reader, TransformersReader
from radq.files import default_cache_folder
from radq.models.embedded import EMBEDDED, judge_folder

Scored = tuple[Sequence[int], Float[np.ndarray, " b"]]  # positions of texts, and their scores


class Judge(ABC):
    """`name` says all that a score depends on besides the texts, since scores are cached under it.

    `together` says how many texts are judged in company. It is 1 where a score depends on its own text alone. Above 1,
    the last digits of a score may depend on all texts of one call of `judge`, and a caller that wants the same digits
    again passes the same texts in the same order, this many at a time.
    """

    name: str
    together: int = 1

    @abstractmethod
    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        """Scores of texts, none of them blank, as they come: in batches, and in any order."""

    @property
    def truncated(self) -> int:
        """How many texts were too long and judged by their beginning, so far."""
        return 0

    def score(self, texts: Sequence[str], progress: bool = False) -> Float[np.ndarray, " n"]:
        """One score per text, in order; NaN for a blank text."""
        scores = np.full(len(texts), np.nan)
        full = [n for n, text in enumerate(texts) if text.strip()]
        with tqdm(total=len(full), unit="text", desc="judging", disable=not progress) as bar:
            for positions, values in self.judge([texts[n] for n in full]):
                self._check([texts[full[n]] for n in positions], values)
                scores[[full[n] for n in positions]] = values
                bar.update(len(positions))
        return scores

    def _check(self, texts: list[str], values: Float[np.ndarray, " b"]) -> None:
        wrong = ~((values >= 0) & (values <= 1))
        if wrong.any():
            n = int(wrong.argmax())
            raise ModelError(
                f"the judge {self.name} gave {values[n]} for {texts[n][:60]!r}.", "is the model damaged, or its dtype?"
            )


@final
class ModelJudge(Judge):
    """The probability of one label of a classifier: sigmoid of a single or independent logits, else softmax."""

    def __init__(self, kind: str, reader: Reader, label: str | None):
        self.reader = reader
        self.together = reader.together
        logits = next(reader.read(["a"]))[1]
        if logits.dim() != 2:
            raise ModelError(f"{reader.name} gives outputs of shape {tuple(logits.shape)}.", "it is no classifier.")
        labels = reader.labels or [str(n) for n in range(logits.shape[1])]
        if len(labels) != logits.shape[1]:
            raise ModelError(
                f"{reader.name} has {logits.shape[1]} outputs, but {len(labels)} labels.", "see config.json."
            )
        if label is None and not reader.labels and len(labels) == 2:
            label = labels[-1]  # nameless outputs of a binary classifier: no, yes
        self.index = choose_label(labels, label, reader.name)
        self.name = f"{kind}:{reader.name}#{labels[self.index]}"

    @property
    def truncated(self) -> int:
        return self.reader.truncated

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        positions, scores = [], []
        for some, logits, _ in self.reader.read(texts):
            positions.extend(some)
            scores.extend(self._probabilities(logits))
            if len(positions) >= BATCH_SIZE:
                yield positions, np.array(scores)
                positions, scores = [], []
        if positions:
            yield positions, np.array(scores)

    def _probabilities(self, logits: Float[Tensor, "b l"]) -> Float[np.ndarray, " b"]:
        independent = self.reader.multi_label or logits.shape[1] == 1
        logits = logits.double()
        probabilities = logits.sigmoid() if independent else logits.softmax(-1)
        return probabilities[:, self.index].cpu().numpy()


def choose_label(labels: Sequence[str], wanted: str | None, model: str) -> int:
    """The position of a label: the one asked for, the only one, or the one that the other negates."""
    if wanted is not None:
        matches = [n for n, label in enumerate(labels) if label == wanted] or [
            n for n, label in enumerate(labels) if _plain(label) == _plain(wanted)
        ]
        if len(matches) == 1:
            return matches[0]
        if wanted.isdecimal() and int(wanted) < len(labels):
            return int(wanted)
        raise OptionError(f"{model} has no label {wanted!r}.", f"it has {', '.join(labels)}.")
    if len(labels) == 1:
        return 0
    if len(labels) == 2:
        for n in (0, 1):
            if _negates(_plain(labels[1 - n]), _plain(labels[n])):
                return n
    raise OptionError(
        f"{model} has the labels {', '.join(labels)}, and none says that it is the attribute.",
        f"add the one you mean, such as #{labels[-1]}.",
    )


def _plain(label: str) -> str:
    return "".join(character for character in label.lower() if character.isalnum())


def _negates(label: str, other: str) -> bool:
    return (label, other) in (("negative", "positive"), ("neg", "pos")) or label in (f"non{other}", f"not{other}")


@final
class LinearJudge(Judge):
    """A logistic regression on sentence embeddings: what `radq judge train` writes."""

    def __init__(self, folder: str | Path, device: str = "cpu", encoder: Encoder | None = None):
        self.model = LinearModel.load(folder)
        self.encoder = encoder or load_encoder(self.model.card.encoder, device)  # one may serve several judges
        if self.encoder.name != self.model.card.encoder_name:
            raise ModelError(
                f"{str(folder)!r} was fitted on the encoder {self.model.card.encoder_name}, "
                f"but {self.model.card.encoder!r} is now {self.encoder.name}.",
                "bring that encoder back, or train the judge anew.",
            )
        self.name = f"linear:{Path(folder).resolve().name}@{self.model.digest()}"
        self.together = self.encoder.reader.together

    @property
    def truncated(self) -> int:
        return self.encoder.truncated

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        for first in range(0, len(texts), TOGETHER):
            some = texts[first : first + TOGETHER]
            yield range(first, first + len(some)), self.model.probabilities(self.encoder.encode(some))


@final
class InvertedJudge(Judge):
    """1 − the score of another judge: of a model whose high scores mean the absence of the attribute."""

    def __init__(self, judge: Judge):
        self.inner = judge
        self.name = f"not:{judge.name}"
        self.together = judge.together

    @property
    def truncated(self) -> int:
        return self.inner.truncated

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        for positions, scores in self.inner.judge(texts):
            yield positions, 1 - scores


@final
class CachedJudge(Judge):
    """A judge that asks another one only about texts it has not seen: scores lie on disk, under judge and text.

    What it returns depends on the judge and the texts of the call alone, to the last bit, whatever the cache held
    before: nothing, the scores of other texts, or some of these, from a run that was killed. Where the judge reads
    several texts together, the texts of a call are cut into groups in their order, without repetitions. A score is then
    kept under its text and the texts of its group, and a group of which any score is missing is judged again as a
    whole. Scores of a judge that reads texts one by one are kept under the text alone.

    Scores are written as they come, so that a kill costs a group at most, and several processes may share the file.
    """

    def __init__(self, judge: Judge, folder: str | Path | None = None):
        self.inner = judge
        self.name = judge.name
        self.file = Path(folder or default_cache_folder()) / "judges.sqlite"

    @property
    def truncated(self) -> int:
        return self.inner.truncated

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        places: dict[str, list[int]] = {}
        for n, text in enumerate(texts):
            places.setdefault(text, []).append(n)
        distinct = list(places)
        keys = make_keys(distinct, self.inner.together)
        with self._open() as database:
            known = self._find(database, keys)
            groups = _find_missing([key in known for key in keys], self.inner.together)
            asked = {n for group in groups for n in group}
            for text, key in (pair for n, pair in enumerate(zip(distinct, keys, strict=True)) if n not in asked):
                yield places[text], np.full(len(places[text]), known[key])
            for group in groups:
                for some, scores in self.inner.judge([distinct[n] for n in group]):
                    self._check([distinct[group[n]] for n in some], scores)
                    self._store(database, [keys[group[n]] for n in some], scores)
                    for n, score in zip(some, scores, strict=True):
                        found = places[distinct[group[n]]]
                        yield found, np.full(len(found), score)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.file, timeout=60)) as database:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS scores"
                    " (judge TEXT, text BLOB, score REAL, PRIMARY KEY (judge, text)) WITHOUT ROWID"
                )
                yield database
        except sqlite3.Error as error:
            raise DataError(
                f"the scores in {str(self.file)!r} cannot be used: {error}.", "remove the file, or name another folder."
            ) from error

    def _find(self, database: sqlite3.Connection, keys: list[bytes]) -> dict[bytes, float]:
        known: dict[bytes, float] = {}
        for first in range(0, len(keys), 500):  # sqlite limits how many values a query takes
            some = keys[first : first + 500]
            marks = ",".join("?" * len(some))
            query = f"SELECT text, score FROM scores WHERE judge = ? AND text IN ({marks})"
            known.update(database.execute(query, [self.name, *some]).fetchall())
        return known

    def _store(self, database: sqlite3.Connection, keys: list[bytes], scores: Float[np.ndarray, " b"]) -> None:
        rows = [(self.name, key, float(score)) for key, score in zip(keys, scores, strict=True)]
        with database:
            database.executemany("INSERT OR IGNORE INTO scores VALUES (?, ?, ?)", rows)


def make_keys(texts: Sequence[str], together: int) -> list[bytes]:
    """The key of each score: a hash of the text, and of the texts of its group where several are judged together."""
    alone = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
    if together == 1:
        return alone
    keys = []
    for first in range(0, len(texts), together):
        group = alone[first : first + together]
        company = hashlib.sha256(b"".join(group)).digest()
        keys += [hashlib.sha256(text + company).digest() for text in group]
    return keys


def _find_missing(known: list[bool], together: int) -> list[Sequence[int]]:
    """Positions to ask the judge about, in the groups in which it is asked: a whole one wherever a score is missing."""
    if together == 1:
        missing = [n for n, is_known in enumerate(known) if not is_known]
        return [missing] if missing else []
    groups = [range(first, min(first + together, len(known))) for first in range(0, len(known), together)]
    return [group for group in groups if not all(known[n] for n in group)]


def load_judge(specification: str, device: str = "cpu") -> Judge:
    """A judge from text, `KIND` or `KIND:WHAT`; the kinds are those of `JUDGES`."""
    kind, _, what = specification.partition(":")
    if kind not in JUDGES:
        raise OptionError(f"there is no judge {specification!r}.", f"begin with one of {', '.join(JUDGES)}.")
    return JUDGES[kind](what, device)


def _load_classifier(what: str, device: str) -> Judge:
    """`NAME_OR_FOLDER[#label]` of a transformers text classifier."""
    source, label = _split_label("classifier", what)
    return ModelJudge("classifier", TransformersReader(source, AutoModelForSequenceClassification, device), label)


def _load_onnx(what: str, device: str) -> Judge:
    """`FOLDER[#label or index]`"""
    folder, label = _split_label("onnx", what)
    return ModelJudge("onnx", OnnxReader(folder, device), label)


def _load_linear(what: str, device: str) -> Judge:
    """`FOLDER`, written by `radq judge train`, or `embedded:ATTRIBUTE`"""
    source, _ = _split_label("linear", what)
    kind, _, attribute = source.partition(":")
    return LinearJudge(judge_folder(attribute) if kind == EMBEDDED else source, device)


def _load_reward(what: str, device: str) -> Judge:
    """`FOLDER[#attribute]` of a reward model"""
    from radq.evaluation.judges.reward import RewardJudge

    folder, attribute = _split_label("reward", what)
    return RewardJudge(folder, attribute, device)


def _load_perspective(what: str, device: str) -> Judge:
    """`[ATTRIBUTE]`"""
    from radq.evaluation.judges.perspective import PerspectiveJudge

    return PerspectiveJudge(what or "TOXICITY")


def _load_inverted(what: str, device: str) -> Judge:
    """Any of the others"""
    return InvertedJudge(load_judge(what, device))


def _split_label(kind: str, what: str) -> tuple[str, str | None]:
    source, _, label = what.partition("#")
    if not source:
        raise OptionError(f"the judge is '{kind}:{what}'.", f"say which, such as {kind}:FOLDER.")
    return source, label or None


JUDGES: dict[str, Callable[[str, str], Judge]] = {
    "classifier": _load_classifier,
    "onnx": _load_onnx,
    "linear": _load_linear,
    "reward": _load_reward,
    "perspective": _load_perspective,
    "not": _load_inverted,
}
