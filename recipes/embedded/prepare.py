"""Write the training data of the embedded reward models, one jsonl file per attribute.

    python recipes/embedded/prepare.py SST2.tsv.gz SST2_DEV.tsv IMDB.jsonl.xz JIGSAW.csv.xz OUT

Sentiment is SST-2's training set and IMDB's training split, evaluated on SST-2's dev set; toxicity is Jigsaw 2018 with
Davidson's tweets. Long texts are cut, since guided texts are short.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from radq.data.tables import read_table

SENTIMENT_CHARACTERS, TOXICITY_CHARACTERS = 700, 450


def phrases(sst2: str) -> Iterator[dict[str, str | int]]:
    for table in read_table(sst2):
        for text, label in zip(table["sentence"], table["label"], strict=True):
            yield {"text": text.rstrip(), "sentiment": int(label)}


def sentiment(sst2: str, imdb: str) -> Iterator[dict[str, str | int]]:
    yield from phrases(sst2)
    for table in read_table(imdb):
        train = table[table["split"] == "train"]
        for text, label in zip(train["text"], train["label"], strict=True):
            whole_words = text.replace("<br /><br />", " ").strip()[:SENTIMENT_CHARACTERS].rsplit(" ", 1)[0]
            yield {"text": whole_words, "sentiment": int(label)}


def toxicity(jigsaw: str) -> Iterator[dict[str, str | int]]:
    for table in read_table(jigsaw):
        for text, label in zip(table["text"], table["is_offensive"], strict=True):
            if text.strip():
                yield {"text": text.strip()[:TOXICITY_CHARACTERS], "toxicity": int(label)}


def main(sst2: str, sst2_dev: str, imdb: str, jigsaw: str, out: str) -> None:
    Path(out).mkdir(parents=True, exist_ok=True)
    files = {"sentiment": sentiment(sst2, imdb), "sst2-dev": phrases(sst2_dev), "toxicity": toxicity(jigsaw)}
    for name, rows in files.items():
        with (Path(out) / f"{name}.jsonl").open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
