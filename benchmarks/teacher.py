"""How much faster a teacher scores candidates if it reads each text once, instead of once for each place.

    python benchmarks/teacher.py --rows 10
    python benchmarks/teacher.py --rows 10 --teacher gedi

Both ways score the same candidates, alternately; the ratio is that of the medians. The models are not trained, which
takes as long.
"""

from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np
import torch
import tyro

from radq import load
from radq.benchmark.measure import describe_machine, read_clock
from radq.guides.dexperts import DExpertsGuide
from radq.guides.gedi import GeDiGuide
from radq.models.kinds import RadV
from radq.models.loading import find_device
from radq.training.candidate_agreement import MarkedPrefix, _score_prefixes, _score_texts
from radq.training.teacher import GuideSource, RewardSource, Source, Teacher

WAYS = {"each text once": _score_texts, "each place anew": _score_prefixes}


@dataclass
class Arguments:
    teacher: Literal["rad-v", "dexperts", "gedi"] = "rad-v"
    """Kind of teacher."""
    backbone: str = "embedded"
    """Language model under the teacher."""
    rows: int = 10
    """Number of texts."""
    tokens: tuple[int, int] = (24, 40)
    """Shortest and longest text."""
    places: int = 8
    """Places in each text."""
    candidates: int = 20
    """Candidates at each place."""
    rounds: int = 3
    """Measurements of each way."""


def main(arguments: Arguments) -> None:
    device, rng = find_device("auto"), np.random.default_rng(0)
    source = make_source(arguments)
    teacher, num_tokens = Teacher([[source]]).to(device), source.vocabularies[0].num_known
    lengths = rng.integers(*arguments.tokens, arguments.rows, endpoint=True)
    prefixes = [make_prefix(int(length), arguments.places, num_tokens, rng) for length in lengths]
    candidates = rng.integers(num_tokens, size=(arguments.rows, arguments.places, arguments.candidates))
    assert teacher.reads_once
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(arguments.rounds):
        for name, score in WAYS.items():
            began = read_clock(device)
            score(teacher, prefixes, candidates.astype(np.int32))
            seconds[name].append(read_clock(device) - began)
    once, anew = (median(values) for values in seconds.values())
    print(*(f"{name}: {median(values):.2f} s" for name, values in seconds.items()), sep="\n")
    print(f"{anew / once:.2f} times as fast ({describe_machine(device)}, torch {torch.__version__})")


def make_source(arguments: Arguments) -> Source:
    if arguments.teacher == "rad-v":
        return RewardSource(RadV.from_backbone(arguments.backbone, attributes=["score"]).eval())
    lm, tokenizer = load(arguments.backbone)
    if arguments.teacher == "gedi":
        return GuideSource(GeDiGuide(lm, ([5], [6]), tokenizer=tokenizer), ["omega"])
    return GuideSource(DExpertsGuide(lm, load(arguments.backbone)[0], 1.0, tokenizer), ["alpha"])


def make_prefix(length: int, num_places: int, num_tokens: int, rng: np.random.Generator) -> MarkedPrefix:
    places = np.sort(rng.choice(np.arange(1, length + 1), num_places, replace=False))
    return MarkedPrefix(rng.integers(num_tokens, size=length).tolist(), places.tolist())


if __name__ == "__main__":
    main(tyro.cli(Arguments))
