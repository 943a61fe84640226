"""Time per token against the number of candidates: unguided, RAD-Q and RAD-V.

    python benchmarks/candidates.py --rad-q DIR --rad-v DIR [--base embedded] [--device cuda] [--dtype float16] [--json]

A batch of samples of one prompt is continued by some tokens, through radq's own decoding. Guides and numbers of
candidates take turns, so that a noisy machine disturbs them alike; times are medians with quartiles.
"""

import argparse
import json
import time
from collections.abc import Iterator
from statistics import quantiles

import torch

from radq import RewardGuide, RewardModel
from radq.decoding.generate import stream
from radq.decoding.steering import Steering
from radq.guides import Guide
from radq.models.loading import find_device, load_causal_lm, load_tokenizer

PROMPT = "The first thing that I noticed about the new place was"
TOKENS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="embedded")
    parser.add_argument("--rad-q", required=True)
    parser.add_argument("--rad-v", required=True)
    parser.add_argument("--candidates", type=int, nargs="+", default=[5, 10, 20, 40, 60, 80, 100])
    parser.add_argument("--batches", type=int, nargs="+", default=[25])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    rows = list(measure(arguments))
    if arguments.json:
        print(
            json.dumps({"machine": describe_machine(arguments.device), "base": arguments.base, "rows": rows}, indent=1)
        )
        return
    print(f"{describe_machine(arguments.device)}: milliseconds per token of a whole batch, {TOKENS} tokens")
    for row in rows:
        print(
            f"  batch {row['batch']:5}  {row['guide']:<6} k = {row['k']:<4} {row['milliseconds_per_token']:8.2f}"
            f"  ({row['low']:.2f} to {row['high']:.2f})"
        )


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    device = find_device(arguments.device)
    lm, tokenizer = load_causal_lm(arguments.base, dtype=arguments.dtype, device=device), load_tokenizer(arguments.base)
    guides: dict[str, Guide | None] = {"none": None}
    for name in ("rad-q", "rad-v"):
        model = RewardModel.from_pretrained(vars(arguments)[name.replace("-", "_")], device, dtype=arguments.dtype)
        guides[name] = RewardGuide(model, dict.fromkeys(model.config.attributes, -10.0))

    def seconds(guide: Guide | None, k: int, batch: int) -> float:
        steps = stream(lm, tokenizer, [PROMPT], guide, Steering(top_k=k), TOKENS, batch, 0, [], batch)
        next(steps)  # the prompt is read before the first
        began = clock(device)
        for _ in steps:
            pass
        return (clock(device) - began) / (TOKENS - 1)

    batches: list[int] = arguments.batches
    variants = [(batch, name, k) for batch in batches for name in guides for k in arguments.candidates]
    times: dict[tuple[int, str, int], list[float]] = {variant: [] for variant in variants}
    for number in range(arguments.rounds + 1):
        for batch, name, k in variants:
            taken = seconds(guides[name], k, batch)
            if number:  # the first round warms up
                times[batch, name, k].append(1000 * taken)
    for (batch, name, k), taken in times.items():
        low, median, high = quantiles(taken, n=4)
        yield {"guide": name, "k": k, "batch": batch, "milliseconds_per_token": median, "low": low, "high": high}


def clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def describe_machine(device: str) -> str:
    on_gpu = find_device(device).startswith("cuda")
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
