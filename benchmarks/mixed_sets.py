"""Tokens per second of requests with 8 sets of guides, compared with the same number of requests with one set.

    python benchmarks/mixed_sets.py [--device cuda] [--requests 64 --tokens 16] [--guide DIR:attribute=β …] [--json]

The base model and two guides are the embedded ones unless others are given; the third is an untrained readout of the
base model, which takes as long as a trained one. The 8 sets are all sets of the three, one after the other; the one set
is the first guide alone. Both runs take turns in one process, and the texts of the mixed run are compared with those of
engines that have each set alone.
"""

import json
import time
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations
from operator import add
from statistics import median
from typing import Any

import numpy as np
import torch
import tyro

import radq
from radq.benchmark.measure import describe_machine
from radq.guides.base import Guide
from radq.guides.reward import RewardGuide

SETS = [own for size in range(4) for own in combinations(range(3), size)]


@dataclass
class Arguments:
    base: str = "embedded"
    """Base model."""
    guide: list[str] = field(default_factory=lambda: ["embedded:sentiment=45", "embedded:toxicity=-95"])
    """The first two guides."""
    device: str = "cpu"
    """cpu, cuda or cuda:1, …"""
    requests: int = 64
    """Texts that are decoded together."""
    tokens: int = 16
    """Tokens of each text."""
    rounds: int = 3
    """Runs of each kind."""
    json: bool = False
    """Print JSON."""


def main(arguments: Arguments) -> None:
    lm, tokenizer = radq.load(arguments.base, arguments.device)
    guides: list[Guide] = [radq.load_guide(one, device=arguments.device, lm=lm) for one in arguments.guide]
    third = radq.RadQ.from_base(arguments.base, ["third"]).to(device=lm.device, dtype=lm.dtype)  # pyright: ignore
    guides.append(RewardGuide(third, {"third": 20.0}))
    prompts = [tokenizer(text)["input_ids"] for text in ("The film was", "My neighbour told me that", "I think")]
    mixed = [SETS[number % len(SETS)] for number in range(arguments.requests)]
    single = [(0,)] * arguments.requests
    seconds: dict[str, list[float]] = {"one set": [], "8 sets": []}
    texts: list[list[int]] = []
    for _ in range(arguments.rounds):
        for name, sets in (("one set", single), ("8 sets", mixed)):
            began = time.perf_counter()
            texts = decode(lm, guides, prompts, sets, arguments.tokens)
            seconds[name].append(time.perf_counter() - began)
    rates = {name: arguments.requests * arguments.tokens / median(found) for name, found in seconds.items()}
    same = sum(
        decode(lm, [guides[one] for one in own], prompts, [None], arguments.tokens, first=number)[0] == texts[number]
        for number, own in enumerate(mixed[: len(SETS)])
    )
    result = {
        "machine": describe_machine(arguments.device),
        "tokens_per_second": rates,
        "ratio": rates["8 sets"] / rates["one set"],
        "same_texts": f"{same} of {min(len(SETS), len(mixed))}",
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{result['machine']}\n{arguments.requests} requests of {arguments.tokens} tokens")
    for name, rate in rates.items():
        print(f"{name:8} {rate:8.1f} tokens/s")
    print(f"ratio {result['ratio']:.2f}; {result['same_texts']} texts are those of their sets alone")


def decode(
    lm: Any, guides: list[Guide], prompts: list[list[int]], sets: list[Any], tokens: int, first: int = 0
) -> list[list[int]]:
    """Decode one text for each set of guides; the first has this number."""
    engine = radq.Engine(lm, reduce(add, guides) if guides else None)
    steering = radq.Steering(top_k=20, kl_budget=1.0)
    tickets = []
    for number, own in enumerate(sets, start=first):
        uniforms = np.random.default_rng(number).random(tokens)
        request = radq.Request(prompts[number % len(prompts)], steering, tokens, uniforms, guides=own)
        tickets.append(engine.submit(request))
    for _ in engine.run():
        pass
    return [[int(row[0]) for row in ticket.rows] for ticket in tickets]


if __name__ == "__main__":
    torch.manual_seed(0)
    main(tyro.cli(Arguments))
