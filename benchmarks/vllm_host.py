"""Guided decoding inside vLLM against vLLM alone: ratios of tokens per second, taken in one run.

    make .venv-vllm/installed
    HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=2 .venv-vllm/bin/python benchmarks/vllm_host.py

The base model and the guides are the embedded ones. `reward alone` is the time in which the reward model reads one
token of every text by itself: guided steps cannot be faster than base model and reward model one after the other. A
readout reads none.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from radq.decoding.config import Steering
from radq.hosts.batching import Steerer
from radq.hosts.follower import HostRequest
from radq.hosts.vllm import VllmEngine
from radq.registry.config import ServeConfig
from radq.registry.loaded_guides import LoadedGuides
from radq.registry.strengths import Guidance

PROMPT = "The film was"
LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each text")
    parser.add_argument("--rounds", type=int, default=3, help="how often each setting is measured, in turn")
    parser.add_argument("--base", default="embedded")
    parser.add_argument("--guide", default="embedded:sentiment", help="a reward model, as DIR:attribute")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    steerer = make_steerer(options)
    with VllmEngine(
        options.base,
        {"guide": f"{options.guide}=20"},
        max_model_len=LENGTH,
        dtype=options.dtype,
        enforce_eager=True,
        max_num_seqs=options.rows,
        gpu_memory_utilization=0.4,
    ) as engine:
        seconds = measure_settings(engine, steerer, options)
    base, reward = seconds["unguided"], seconds.pop("reward alone")
    bound = (base + reward) / base
    print(f"{options.rows} requests of {options.tokens} tokens, seconds per step; medians of {options.rounds}")
    for name, number in seconds.items():
        speed = options.rows / number
        print(f"{name:42} {number * 1e3:8.1f} ms  {speed:7.1f} tokens/s  {number / base:5.2f} × unguided")
    print(f"{'reward alone':42} {reward * 1e3:8.1f} ms")
    print(f"(base + reward) / base                     {bound:.2f}")
    print(f"one strength: time / bound                 {seconds['one strength'] / base / bound:.2f}")
    print(f"different settings: speed / one strength   {seconds['one strength'] / seconds['different settings']:.2f}")


def measure_settings(engine: VllmEngine, steerer: Steerer, options: argparse.Namespace) -> dict[str, float]:
    """Seconds per step of each kind of batch."""
    rng = random.Random(0)
    name = "guide"

    def settings(kind: str, row: int) -> dict[str, Any]:
        if kind == "unguided":
            return {}
        radq: dict[str, Any] = {name: 20.0, "top_k": 20, "kl_budget": None}
        extra: dict[str, Any] = {}
        if kind == "different settings":
            radq |= {name: rng.uniform(-40, 40), "top_k": rng.randint(5, 40)}
            radq["kl_budget"] = rng.choice([None, 0.2, 0.5])
            extra = {"radq_top_p": rng.choice([0.8, 0.9, 0.95])}
        if kind == "one of 1024 candidates" and row == 0:
            radq |= {"top_k": 1024, "kl_budget": 0.5}
        return {"radq": radq, **extra}

    def run(kind: str) -> float:
        vllm = engine._vllm
        temperatures = [
            rng.choice([0.5, 0.8, 1.0]) if kind == "different settings" else 1.0 for _ in range(options.rows)
        ]
        params = [
            vllm.SamplingParams(
                temperature=temperatures[row],
                max_tokens=options.tokens,
                ignore_eos=True,
                detokenize=False,
                seed=row,
                extra_args=settings(kind, row),
            )
            for row in range(options.rows)
        ]
        prompt = {"prompt_token_ids": engine.tokenizer(PROMPT).input_ids}
        return clock(lambda: engine.llm.generate([prompt] * options.rows, params, use_tqdm=False)) / options.tokens

    kinds = ("unguided", "one strength", "different settings", "one of 1024 candidates")
    found: dict[str, list[float]] = {kind: [] for kind in (*kinds, "reward alone")}
    for round_number in range(options.rounds + 1):
        measured = {kind: run(kind) for kind in kinds} | {"reward alone": measure_reward(steerer, options)}
        for kind, seconds in measured.items():
            if round_number:  # the first one warms up
                found[kind].append(seconds)
    return {kind: statistics.median(numbers) for kind, numbers in found.items()}


def make_steerer(options: argparse.Namespace) -> Steerer:
    """The reward model outside vLLM, with as many texts."""
    loaded = LoadedGuides.load(ServeConfig(guides={"guide": options.guide}).guides)
    steerer = Steerer(loaded, options.rows, LENGTH)
    if reads_base(steerer):
        return steerer
    guidance = Guidance({"guide": 20.0}, Steering())
    requests = {row: HostRequest(guidance, [5, 6, 7], []) for row in range(options.rows)}
    steerer.steer(torch.randn(options.rows, loaded.guides[0].vocab_size), requests)
    return steerer


def reads_base(steerer: Steerer) -> bool:
    """Whether the reward model is a readout, which reads vLLM's own states."""
    return bool(steerer.loaded.guides[0].readers[0].base_layers)


def measure_reward(steerer: Steerer, options: argparse.Namespace) -> float:
    """Seconds in which the reward model reads one token of every text."""
    follower = steerer.followers[0]
    if reads_base(steerer):
        return 0.0

    def read() -> None:
        with torch.inference_mode():
            follower._advance(list(range(options.rows)), torch.randint(5, 1000, (options.rows,)))
            follower._reserve(20)

    return statistics.median(clock(read) for _ in range(options.tokens // 2))


def clock(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
