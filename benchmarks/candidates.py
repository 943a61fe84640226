"""Time per token for different numbers of candidates: without a guide, with RAD-Q and with RAD-V.

    python benchmarks/candidates.py --rad-q DIR --rad-v DIR [--base embedded] [--device cuda] [--dtype float16] [--json]

radq continues a batch of samples of one prompt by 20 tokens. Guides and numbers of candidates take turns, so that other
work on the machine disturbs all of them alike. Times are medians with quartiles.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Literal

import torch
import tyro
from machine import describe_machine, read_clock

from radq import RewardGuide, RewardModel
from radq.decoding.generate import stream
from radq.decoding.steering import Steering
from radq.guides import Guide
from radq.models.loading import find_device, load_causal_lm, load_tokenizer

PROMPT = "The first thing that I noticed about the new place was"
TOKENS = 20


@dataclass
class Arguments:
    rad_q: str
    """Folder of a RAD-Q reward model."""
    rad_v: str
    """Folder of a RAD-V reward model."""
    base: str = "embedded"
    """Language model that is steered: hub name, folder, or embedded."""
    candidates: list[int] = field(default_factory=lambda: [5, 10, 20, 40, 60, 80, 100])
    """Numbers of candidates k."""
    batches: list[int] = field(default_factory=lambda: [25])
    """Numbers of samples that are generated together."""
    rounds: int = 7
    """Measurements of each variant, after one that warms up."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of all models; auto takes that of the files."""
    json: bool = False
    """Print JSON."""


def main(arguments: Arguments) -> None:
    rows = list(measure(arguments))
    machine = f"{describe_machine(find_device(arguments.device))}, torch {torch.__version__}"
    if arguments.json:
        print(json.dumps({"machine": machine, "base": arguments.base, "rows": rows}, indent=1))
        return
    print(f"{machine}: milliseconds per token of a whole batch, {TOKENS} tokens")
    for row in rows:
        print(
            f"  batch {row['batch']:5}  {row['guide']:<6} k = {row['k']:<4} {row['milliseconds_per_token']:8.2f}"
            f"  ({row['low']:.2f} to {row['high']:.2f})"
        )


def measure(arguments: Arguments) -> Iterator[dict[str, object]]:
    """Quartiles of the milliseconds per token of every variant: size of the batch, guide, number of candidates."""
    device = find_device(arguments.device)
    lm, tokenizer = load_causal_lm(arguments.base, dtype=arguments.dtype, device=device), load_tokenizer(arguments.base)
    guides: dict[str, Guide | None] = {"none": None}
    for name, folder in {"rad-q": arguments.rad_q, "rad-v": arguments.rad_v}.items():
        model = RewardModel.from_pretrained(folder, device, dtype=arguments.dtype)
        guides[name] = RewardGuide(model, dict.fromkeys(model.config.attributes, -10.0))

    def seconds(guide: Guide | None, k: int, batch: int) -> float:
        steps = stream(lm, tokenizer, [PROMPT], guide, Steering(top_k=k), TOKENS, batch, 0, [], batch)
        next(steps)  # the first step also reads the prompt
        began = read_clock(device)
        for _ in steps:
            pass
        return (read_clock(device) - began) / (TOKENS - 1)

    variants = [(batch, name, k) for batch in arguments.batches for name in guides for k in arguments.candidates]
    times: dict[tuple[int, str, int], list[float]] = {variant: [] for variant in variants}
    for number in range(arguments.rounds + 1):
        for batch, name, k in variants:
            taken = seconds(guides[name], k, batch)
            if number:  # the first round warms up
                times[batch, name, k].append(1000 * taken)
    for (batch, name, k), taken in times.items():
        low, median, high = quantiles(taken, n=4)
        yield {"guide": name, "k": k, "batch": batch, "milliseconds_per_token": median, "low": low, "high": high}


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
