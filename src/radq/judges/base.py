"""The base class of judges, which score texts (higher for more of the attribute), and a cache of scores.

    judge = CachedJudge(load_judge("classifier:distilbert-base-uncased-finetuned-sst-2-english", device="cuda"))
    judge.score(["what a lovely film", ""])  # array([0.9998, nan])

The kinds of judges, and `load_judge`, are in `radq.judges.models`. Scores run from 0 to 1 unless `Judge.limits` says
otherwise.

The score of a blank text (empty, or whitespace alone) is NaN, whatever the judge. Metrics leave such texts out, and
count them.

The caller chooses the text that a judge reads. The paper's toxicity judges read the continuation alone, its sentiment
judge reads prompt and continuation.
"""

import hashlib
import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from radq.errors import DataError, ModelError
from radq.files import default_cache_folder

CARD = "judge.json"  # the file by which a folder shows that it holds a judge
Scored = tuple[Sequence[int], Float[np.ndarray, " b"]]  # positions in the list of texts, and scores there


class Judge(ABC):
    """Scores texts.

    Attributes:
        name: all that a score depends on besides the texts, since scores are cached under it.
        attribute: a word for what is scored, such as "toxicity".
        limits: the lowest and the highest score.
        group_size: 1 where a score depends on its own text alone. Above 1, the last digits of a score may depend on all
            texts of one call of `judge`, since a model rounds differently in another batch; a caller that wants the
            same digits again passes the same texts in the same order, this many at a time.
    """

    name: str
    attribute: str = "score"
    limits: tuple[float, float] = (0.0, 1.0)
    group_size: int = 1

    @abstractmethod
    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        """Yield the scores of texts that are not blank, in batches in any order; an empty one for a missing score."""

    @cached_property
    def counts(self) -> Counter[str]:
        """The numbers of texts so far that were `truncated` since they were too long, or `missing` since they could not
        be scored. A judge that asks another one, or a reader, has the counts of that one."""
        return Counter()

    @property
    def truncated(self) -> int:
        return self.counts["truncated"]

    @property
    def missing(self) -> int:
        return self.counts["missing"]

    def score(self, texts: Sequence[str], progress: bool = False) -> Float[np.ndarray, " n"]:
        """Score each text, in order; the score of a blank text, or of one that the judge cannot score, is NaN."""
        scores = np.full(len(texts), np.nan)
        full = [n for n, text in enumerate(texts) if text.strip()]
        with tqdm(total=len(full), unit="text", desc="judging", disable=not progress) as bar:
            for positions, values in self.judge([texts[n] for n in full]):
                self._check([texts[full[n]] for n in positions], values)
                scores[[full[n] for n in positions]] = values
                bar.update(len(positions) or 1)
                if self.missing:
                    bar.set_postfix(missing=self.missing)
        return scores

    def _check(self, texts: list[str], values: Float[np.ndarray, " b"]) -> None:
        low, high = self.limits
        wrong = ~((values >= low) & (values <= high) & np.isfinite(values))
        if wrong.any():
            n = int(wrong.argmax())
            allowed = f"from {low:g} to {high:g}" if np.isfinite([low, high]).all() else "finite"
            raise ModelError(
                f"the judge {self.name} gave {values[n]} for {texts[n][:60]!r}; scores must be {allowed}.",
                "check that the model's files are whole, and its dtype.",
            )


@final
class CachedJudge(Judge):
    """Keeps the scores of another judge on disk, and asks that judge only about texts whose scores are missing.

    The result depends on the judge and the texts of the call alone, to the last bit, whatever the cache held before.
    Where the judge reads several texts together (`group_size` above 1), the distinct texts of a call are cut into
    groups in their order. A score is then kept under its text and the texts of its group, and a group with a missing
    score is judged again as a whole.

    Scores are written as they come, so that a kill loses one group at most. Several processes may share the file.
    Missing scores are not kept: the next call asks for them again. `kept` counts the scores that were found on disk.
    """

    def __init__(self, judge: Judge, folder: str | Path | None = None):
        self.inner, self.counts = judge, judge.counts
        self.name, self.attribute, self.limits = judge.name, judge.attribute, judge.limits
        self.file = Path(folder or default_cache_folder()) / "judges.sqlite"
        self.kept = 0

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        positions: dict[str, list[int]] = {}
        for n, text in enumerate(texts):
            positions.setdefault(text, []).append(n)
        distinct = list(positions)
        size = self.inner.group_size
        keys = make_keys(distinct, size)
        with self._open() as database:
            query = "SELECT text, score FROM scores WHERE judge = ? AND text = ?"
            known = dict(row for key in keys for row in database.execute(query, (self.name, key)))
            missing = [n for n, key in enumerate(keys) if key not in known]
            groups: list[Sequence[int]] = [missing] if missing else []
            if size > 1:
                firsts = dict.fromkeys(n // size * size for n in missing)
                groups = [range(first, min(first + size, len(keys))) for first in firsts]
            asked = {n for group in groups for n in group}
            for n, (text, key) in enumerate(zip(distinct, keys, strict=True)):
                if n not in asked:
                    self.kept += len(positions[text])
                    yield positions[text], np.full(len(positions[text]), known[key])
            for group in groups:
                for some, scores in self.inner.judge([distinct[n] for n in group]):
                    if not some:
                        yield some, scores
                    self._check([distinct[group[n]] for n in some], scores)
                    self._store(database, [keys[group[n]] for n in some], scores)
                    for n, score in zip(some, scores, strict=True):
                        same = positions[distinct[group[n]]]
                        yield same, np.full(len(same), score)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the database of scores, and close it after the block."""
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
                f"cannot use the scores in {str(self.file)!r}: {error}.", "remove the file, or choose another folder."
            ) from error

    def _store(self, database: sqlite3.Connection, keys: list[bytes], scores: Float[np.ndarray, " b"]) -> None:
        rows = [(self.name, key, float(score)) for key, score in zip(keys, scores, strict=True)]
        with database:
            database.executemany("INSERT OR IGNORE INTO scores VALUES (?, ?, ?)", rows)


def make_keys(texts: Sequence[str], group_size: int) -> list[bytes]:
    """Hash each text and, where several are judged together, the texts of its group: the keys of the cached scores."""
    keys = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in texts]
    if group_size == 1:
        return keys
    groups = [keys[first : first + group_size] for first in range(0, len(keys), group_size)]
    return [
        hashlib.sha256(key + hashlib.sha256(b"".join(group)).digest()).digest() for group in groups for key in group
    ]
