"""What a step of guidance costs: RAD-Q at k = 20 and at the whole vocabulary, RAD-V against separate forwards.

    python benchmarks/decoding.py [--device cuda] [--dtype bfloat16] [--json]

A random reward model of GPT-2-small's shape reads a batch of 8 prefixes; a step scores candidates and advances by one
token. The variants take turns, so that a noisy machine disturbs them alike; times are medians, ratios are what counts.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from radq import RadQ, RadV, RewardGuide
from radq.models.loading import quiet
from radq.models.reward import RewardState

BATCH, PREFIX, K = 8, 64, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, quiet():
        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
        models = [
            kind.from_backbone(folder, ["toxicity"], dtype=getattr(torch, arguments.dtype)) for kind in (RadQ, RadV)
        ]
    for model in models:
        nn.Module.to(model, arguments.device)
    guide_q, guide_v = (RewardGuide(model, {"toxicity": -50.0}) for model in models)
    seconds = measure(variants(guide_q, guide_v, arguments.device), arguments.rounds)
    on_cpu = arguments.device == "cpu"
    report = {
        "machine": f"CPU, {torch.get_num_threads()} threads" if on_cpu else torch.cuda.get_device_name(),
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


def measure(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(rounds + 2):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_ >= 2:  # the first two warm up
                seconds[name].append(time.perf_counter() - begin)
    return {name: median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
