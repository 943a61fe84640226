"""What the study needs beside the reward models' training data: prompts, and texts for judges that saw none of it.

    python recipes/study/prepare.py RTP.jsonl.gz NEUTRAL.jsonl.gz NEGATIVE.jsonl.gz IMDB.jsonl.xz OUT

The records of RealToxicityPrompts are parted once: the toxicity judge learns Perspective's scores from one part; the
other gives the prompts to continue, and the texts that say how good the judge is. The sentiment judge learns from the
ends of reviews, where the verdict is, of IMDB's test split, of which the reward models saw nothing.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from radq.data.tables import read_table

PROMPTS = 1000  # of each kind
UNSEEN_RECORDS = 1400  # of RealToxicityPrompts: what the toxicity judge does not see
UNSEEN_REVIEWS = 2500  # of IMDB's test split: what the sentiment judge does not see
FEWEST_WORDS, MOST_WORDS = (6, 30), 40  # of an end: about as long as a prompt with its continuation
MAX_TOXICITY = 0.5


def read_rows(file: str) -> list[dict[str, Any]]:
    return [row for table in read_table(file) for row in table.to_dict("records")]


def perspective(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Prompts and continuations with Perspective's toxicity, where it has one."""
    for record in records:
        for part in (record["prompt"], record["continuation"]):
            if part["toxicity"] is not None and part["text"].strip():
                yield {"text": part["text"].strip(), "toxicity": part["toxicity"]}


def ends(reviews: Iterable[dict[str, Any]], rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """The last sentences of each, of various lengths."""
    for review in reviews:
        sentences = re.split(r"(?<=[.!?])\s+", review["text"].replace("<br /><br />", " ").strip())
        words, fewest = [], rng.integers(*FEWEST_WORDS)
        while sentences and len(words) < fewest:
            words = sentences.pop().split() + words
        yield {"text": " ".join(words[-MOST_WORDS:]), "sentiment": int(review["label"])}


def write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def main(rtp: str, neutral: str, negative: str, imdb: str, out: str) -> None:
    folder, rng = Path(out), np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)

    records = read_rows(rtp)
    records = [records[n] for n in rng.permutation(len(records))]
    unseen, seen = records[:UNSEEN_RECORDS], records[UNSEEN_RECORDS:]
    write(folder / "judge-toxicity.jsonl", perspective(seen))
    write(folder / "judge-toxicity-unseen.jsonl", perspective(unseen))
    prompts = [record["prompt"] for record in unseen if record["prompt"]["toxicity"] is not None]
    nontoxic = [prompt for prompt in prompts if prompt["toxicity"] < MAX_TOXICITY][:PROMPTS]
    write(folder / "rtp.jsonl", ({"prompt": prompt["text"]} for prompt in nontoxic))

    for name, file in (("neutral", neutral), ("negative", negative)):
        rows = read_rows(file)
        chosen = np.sort(rng.choice(len(rows), size=PROMPTS, replace=False))
        write(folder / f"{name}.jsonl", ({"prompt": rows[n]["prompt"]["text"]} for n in chosen))

    reviews = [row for row in read_rows(imdb) if row["split"] == "test"]
    reviews = [reviews[n] for n in rng.permutation(len(reviews))]
    write(folder / "judge-sentiment.jsonl", ends(reviews[UNSEEN_REVIEWS:], rng))
    write(folder / "judge-sentiment-unseen.jsonl", ends(reviews[:UNSEEN_REVIEWS], rng))


if __name__ == "__main__":
    main(*sys.argv[1:])
