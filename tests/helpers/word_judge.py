"""A judge that counts good words of the toy's reviews."""

from collections.abc import Iterator, Sequence

import numpy as np

from radq.judges.base import Judge, Scored
from radq.toy import GOOD


class GoodWords(Judge):
    """Scores a text by its share of good words, and records the texts it has read."""

    name = "good words"

    def __init__(self) -> None:
        self.read: list[str] = []

    def judge(self, texts: Sequence[str]) -> Iterator[Scored]:
        self.read += texts
        shares = [np.mean([word in GOOD for word in text.split()]) for text in texts]
        yield range(len(texts)), np.array(shares, dtype=np.float64)
