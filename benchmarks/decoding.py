"""Time of one step of guidance: RAD-Q with 20 candidates and with all tokens, RAD-V with one forward and with many.

    python benchmarks/decoding.py [--device cuda] [--dtype bfloat16] [--json]

A random reward model with the shape of GPT-2-small reads a batch of 8 prefixes. A step scores candidates and then reads
one more token. The variants take turns, so that other work on the machine disturbs all of them alike. Times are
medians; compare their ratios, since the times depend on the machine.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
import tyro
from machine import describe_machine, read_clock
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from radq import RadQ, RadV, RewardGuide
from radq.models.hub import quiet
from radq.models.reward import RewardState

BATCH, PREFIX, K = 8, 64, 20


@dataclass
class Arguments:
    device: str = "cpu"
    """cpu, cuda or cuda:1, …"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the reward models."""
    rounds: int = 10
    """Measurements of each variant, after two that warm up."""
    json: bool = False
    """Print JSON."""


def main(arguments: Arguments) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, quiet():
        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
        models = [
            kind.from_backbone(folder, ["toxicity"], dtype=getattr(torch, arguments.dtype)) for kind in (RadQ, RadV)
        ]
    for model in models:
        nn.Module.to(model, arguments.device)
    guide_q, guide_v = (RewardGuide(model, {"toxicity": -50.0}) for model in models)
    seconds = measure(variants(guide_q, guide_v, arguments.device), arguments.rounds, arguments.device)
    report = {
        "machine": describe_machine(arguments.device),
        "dtype": arguments.dtype,
        "torch": torch.__version__,
        "milliseconds": {name: round(1000 * value, 2) for name, value in seconds.items()},
        "rad_q_whole_vocabulary_over_k20": round(seconds["RAD-Q, whole vocabulary"] / seconds["RAD-Q, k = 20"], 3),
        "rad_v_separate_forwards_over_siblings": round(
            seconds["RAD-V, k = 20, separate forwards"] / seconds["RAD-V, k = 20, siblings"], 3
        ),
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{report['machine']}, {report['dtype']}, torch {report['torch']}; batch {BATCH}, prefix {PREFIX}")
    for name, value in seconds.items():
        print(f"  {name:<34} {1000 * value:8.2f} ms per step")
    print(f"RAD-Q: whole vocabulary / k = 20         {report['rad_q_whole_vocabulary_over_k20']:.2f}×")
    print(f"RAD-V: separate forwards / siblings      {report['rad_v_separate_forwards_over_siblings']:.2f}×")


def variants(guide_q: RewardGuide, guide_v: RewardGuide, device: str) -> dict[str, Callable[[], object]]:
    """The steps to measure, by name."""
    size = guide_q.vocab_size
    prompts = torch.randint(size, (BATCH, PREFIX), device=device)
    few = torch.randint(size, (BATCH, K), device=device)
    whole = torch.arange(size, device=device).expand(BATCH, -1)
    tokens = few[:, 0]
    state_q, state_v = guide_q.start(prompts), guide_v.start(prompts)

    def step(guide: RewardGuide, state: RewardState, candidates: Tensor) -> object:
        return guide.advance(guide.advise(state, candidates).state, tokens)

    def separate_forwards() -> object:
        for column in few.T:
            guide_v.advise(state_v, column[:, None].contiguous())
        return guide_v.advance(state_v, tokens)

    return {
        "RAD-Q, k = 20": lambda: step(guide_q, state_q, few),
        "RAD-Q, whole vocabulary": lambda: step(guide_q, state_q, whole),
        "RAD-V, k = 20, siblings": lambda: step(guide_v, state_v, few),
        "RAD-V, k = 20, separate forwards": separate_forwards,
    }


def measure(functions: dict[str, Callable[[], object]], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of each function."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(rounds + 2):
        for name, function in functions.items():
            begin = read_clock(device)
            function()
            if round_ >= 2:  # the first two warm up
                seconds[name].append(read_clock(device) - begin)
    return {name: median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
