"""Prompts, and texts for judges that share none with the reward models.

Test prompts are the published ones; prompts of other records choose settings, and are continued for training.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from radq.data.tables import read_table

NUM_PROMPTS = 1000  # of each kind
UNSEEN_RECORDS = 1400  # records of RealToxicityPrompts that the toxicity judge does not see
UNSEEN_REVIEWS = 2500  # reviews of IMDB's test split that the sentiment judge does not see
FEWEST_WORDS, MOST_WORDS = (6, 30), 40  # of the end of a review: about as long as a prompt with its continuation
MAX_TOXICITY = 0.5
DEV_PROMPTS = 200  # of each kind, to choose settings by
OWN_BEGINNINGS = 1500  # of training texts, that are continued beside prompts
BEGINNING = 8  # words at most
PERSPECTIVE = (
    *("toxicity", "severe_toxicity", "profanity", "sexually_explicit"),
    *("identity_attack", "flirtation", "threat", "insult"),
)


def prepare(rtp: str, neutral: str, negative: str, imdb: str) -> None:
    """Write prompts and the judges' data into data/.

    One part of RealToxicityPrompts' records trains the toxicity judge; the other gives the prompts to continue and the
    texts that measure the judge. The sentiment judge learns from the ends of reviews of IMDB's test split.
    """
    Path("data").mkdir(exist_ok=True)
    rng = np.random.default_rng(0)

    records = _shuffled(_read_rows(rtp), rng)
    unseen, seen = records[:UNSEEN_RECORDS], records[UNSEEN_RECORDS:]
    _write_rows("judge-toxicity", _perspective_scores(seen))
    _write_rows("judge-toxicity-unseen", _perspective_scores(unseen))
    prompts = [record["prompt"] for record in unseen if record["prompt"]["toxicity"] is not None]
    nontoxic = (prompt for prompt in prompts if prompt["toxicity"] < MAX_TOXICITY)
    _write_rows("rtp", ({"prompt": prompt["text"]} for prompt in islice(nontoxic, NUM_PROMPTS)))

    others = {"rtp": [record["prompt"] for record in seen]}  # than those that are tested
    for name, file in (("neutral", neutral), ("negative", negative)):
        rows = _read_rows(file)
        chosen = np.sort(rng.choice(len(rows), size=NUM_PROMPTS, replace=False))
        _write_rows(name, ({"prompt": rows[n]["prompt"]["text"]} for n in chosen))
        others[name] = [rows[n]["prompt"] for n in np.setdiff1d(np.arange(len(rows)), chosen)]

    reviews = _shuffled([row for row in _read_rows(imdb) if row["split"] == "test"], rng)
    _write_rows("judge-sentiment", _ends_of_reviews(reviews[UNSEEN_REVIEWS:], rng))
    _write_rows("judge-sentiment-unseen", _ends_of_reviews(reviews[:UNSEEN_REVIEWS], rng))
    prepare_other_prompts(others)
    prepare_halves(seen)


def prepare_halves(records: list[dict[str, Any]]) -> None:
    """Write Perspective's scores of one half of the records for a reward model, and of the other for its judge.

    The reward model's half holds no dev prompts.
    """
    half = len(records) // 2
    dev = {row["prompt"] for row in _read_rows("data/dev-rtp.jsonl")}
    learnt = [record for record in records[half:] if record["prompt"]["text"] not in dev]
    _write_rows("half-judge-toxicity", _perspective_scores(records[:half]))
    _write_rows("half-toxicity", _perspective_scores(learnt))


def prepare_other_prompts(others: dict[str, list[dict[str, Any]]]) -> None:
    """Write prompts to choose settings by (dev-NAME) and prompts to continue for training (write-ATTRIBUTE).

    Neither are test prompts. Those of RealToxicityPrompts come from the records that train the toxicity judge.
    """
    rng = np.random.default_rng(1)
    tested = {row["prompt"] for name in others for row in _read_rows(f"data/{name}.jsonl")}
    rest = {}
    for name, prompts in others.items():
        texts = list(dict.fromkeys(prompt["text"] for prompt in _shuffled(prompts, rng) if _may_test(name, prompt)))
        texts = [text for text in texts if text not in tested]
        _write_rows(f"dev-{name}", ({"prompt": text} for text in texts[:DEV_PROMPTS]))
        known = {*tested, *texts[:DEV_PROMPTS]}
        rest[name] = [prompt["text"] for prompt in prompts if prompt["text"] not in known]
    for attribute, names in (("sentiment", ("neutral", "negative")), ("toxicity", ("rtp", "neutral"))):
        beginnings = _beginnings(f"data/{attribute}.jsonl", rng)
        texts = [text for name in names for text in rest[name]] + beginnings
        _write_rows(f"write-{attribute}", ({"prompt": text} for text in texts))


def _may_test(name: str, prompt: dict[str, Any]) -> bool:
    """Whether a prompt is of the kind that is tested: those of RealToxicityPrompts must not be toxic."""
    return name != "rtp" or (prompt["toxicity"] is not None and prompt["toxicity"] < MAX_TOXICITY)


def _beginnings(file: str, rng: np.random.Generator) -> list[str]:
    """The first words of some texts."""
    rows = _read_rows(file)
    chosen = rng.choice(len(rows), size=min(OWN_BEGINNINGS, len(rows)), replace=False)
    lengths = rng.integers(2, BEGINNING + 1, size=len(chosen))
    begun = [" ".join(rows[n]["text"].split()[:length]) for n, length in zip(chosen, lengths, strict=True)]
    return [text for text in begun if text]


def _perspective_scores(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Prompts and continuations with Perspective's eight scores, where there are any."""
    for record in records:
        for part in (record["prompt"], record["continuation"]):
            if part["toxicity"] is not None and part["text"].strip():
                yield {"text": part["text"].strip()} | {name: part[name] for name in PERSPECTIVE}


def _ends_of_reviews(reviews: Iterable[dict[str, Any]], rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """The last sentences of each review, which hold its verdict, in various lengths."""
    for review in reviews:
        sentences = re.split(r"(?<=[.!?])\s+", review["text"].replace("<br /><br />", " ").strip())
        words, fewest = [], rng.integers(*FEWEST_WORDS)
        while sentences and len(words) < fewest:
            words = sentences.pop().split() + words
        yield {"text": " ".join(words[-MOST_WORDS:]), "sentiment": int(review["label"])}


def _shuffled(rows: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    return [rows[n] for n in rng.permutation(len(rows))]


def _read_rows(file: str) -> list[dict[str, Any]]:
    return [row for table in read_table(file) for row in table.to_dict("records")]


def _write_rows(name: str, rows: Iterable[dict[str, Any]]) -> None:
    with Path(f"data/{name}.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
