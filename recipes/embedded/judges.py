"""Fit the embedded judges: linear models over the embedded base, on texts that the reward models never saw.

    python recipes/embedded/judges.py IMDB.jsonl.xz REALTOXICITYPROMPTS.jsonl.gz data/half-toxicity.jsonl OUT

Sentiment is learnt from the ends of reviews of IMDB's test split, which hold the verdict; toxicity from Perspective's
scores of RealToxicityPrompts, without the records that the reward model has learnt from, which the third file holds. It
takes ten minutes on one CPU core.
"""

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from radq.data.tables import read_table
from radq.judges.linear import Card, LinearModel, Split
from radq.judges.readers import Encoder, load_encoder

REVIEWS = 12_000
FEWEST_WORDS, MOST_WORDS = 12, 30  # of the end of a review: about as long as a generated text
Row = tuple[str, float, int]  # text, label, group: rows of a group are on the same side of the split


def sentiment(imdb: str) -> Iterator[Row]:
    tables = [table[table["split"] == "test"] for table in read_table(imdb)]
    reviews = [row for table in tables for row in zip(table["text"], table["label"], strict=True)]
    for group, (text, label) in enumerate(random.Random(0).sample(reviews, REVIEWS)):
        yield end(text), float(label), group


def end(review: str) -> str:
    """The last sentences of a review, cut to MOST_WORDS."""
    sentences = re.split(r"(?<=[.!?]) ", " ".join(re.sub(r"<[^>]*>", " ", review).split()))
    words: list[str] = []
    while sentences and len(words) < FEWEST_WORDS:
        words = sentences.pop().split() + words
    return " ".join(words[-MOST_WORDS:])


def toxicity(prompts: str, learnt: str) -> Iterator[Row]:
    known = {text for table in read_table(learnt) for text in table["text"]}
    records = (
        pair for table in read_table(prompts) for pair in zip(table["prompt"], table["continuation"], strict=True)
    )
    for group, record in enumerate(records):
        if any(part["text"].strip() in known for part in record):
            continue
        for part in record:
            if part["text"].strip() and part["toxicity"] is not None:
                yield part["text"], part["toxicity"], group


def fit(encoder: Encoder, name: str, rows: list[Row], data: str) -> LinearModel:
    texts, labels, groups = zip(*rows, strict=True)
    features = encoder.encode(texts, progress=True)
    card = Card("embedded", encoder.name, name, [data])
    return LinearModel.fit(features, np.array(labels), split_groups(np.array(groups)), card)


def split_groups(groups: np.ndarray) -> Split:
    """Hold out a tenth of the groups for choosing the penalty and another tenth for measuring."""
    drawn = np.random.default_rng(0).permutation(np.unique(groups))
    tenth = len(drawn) // 10
    parts = drawn[2 * tenth :], drawn[:tenth], drawn[tenth : 2 * tenth]
    return Split(*(np.flatnonzero(np.isin(groups, part)) for part in parts))


def main(imdb: str, prompts: str, learnt: str, out: str) -> None:
    encoder = load_encoder("embedded")
    for name, rows, data in (
        ("sentiment", sentiment(imdb), "IMDB, test split: ends of reviews"),
        (
            "toxicity",
            toxicity(prompts, learnt),
            "RealToxicityPrompts: prompts and continuations, Perspective's toxicity",
        ),
    ):
        model = fit(encoder, name, list(rows), data)
        model.save(Path(out) / name)
        print(name, json.dumps(model.card.metrics))


if __name__ == "__main__":
    main(*sys.argv[1:])
