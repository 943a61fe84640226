"""Requests and guides for an engine, each with settings of its own."""

from pathlib import Path
from typing import Any

import numpy as np
from baselines import make_guide
from families import EOS, VOCAB, make_reward

from radq.decoding.config import Steering
from radq.decoding.request import Request
from radq.guides.base import Guide
from radq.guides.reward import RewardGuide

STEERINGS = [
    Steering(top_k=5),
    Steering(top_k=None),
    Steering(top_k=8, top_p=0.7, temperature=1.3),
    Steering(top_k=3, temperature=0.0),
    Steering(top_k=20, kl_budget=0.2),
]


def make_request(number: int, length: int = 8, **changes: Any) -> Request:
    """A request with a prompt, settings and random numbers of its own."""
    random = np.random.default_rng(number)
    options: dict[str, Any] = {
        "prompt": random.integers(3, VOCAB, 1 + number % 6).tolist(),
        "steering": STEERINGS[number % len(STEERINGS)],
        "max_new_tokens": length,
        "uniforms": random.random(length),
        "stops": frozenset([EOS, 7]),
    }
    return Request(**(options | changes))


def make_any_guide(name: str, lm_folders: dict[str, Path]) -> Guide | None:
    if name == "none":
        return None
    if name in ("q", "v"):
        return RewardGuide(make_reward(name, lm_folders["llama"]).double(), {"nice": 4.0, "rude": -6.0})
    if name == "sum":
        return make_any_guide("q", lm_folders) + make_guide("dexperts", "llama")  # pyright: ignore
    return make_guide(name, "llama")
