"""A short trial of data types and threads on a CPU: which of them decodes fastest on this machine.

Texts depend on both in the last digits of sums, so nothing is tried unless somebody asks for it: --dtype fastest.
"""

import logging
import time
from itertools import product

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from radq.models.loading import load_config, truncate
from radq.sources.model_source import ModelName

LOGGER = logging.getLogger(__name__)
FASTEST = "fastest"
ROUNDS = 7


def choose_dtype(dtype: str, base: ModelName, device: str) -> str:
    """The data type that is asked for; where it is `fastest`, the one that wins a trial. A trial also sets the threads.

    On a GPU it is bfloat16, or float16 on one without bfloat16: no trial is needed for that.
    """
    if dtype != FASTEST:
        return dtype
    if not device.startswith("cpu"):
        return "bfloat16" if not device.startswith("cuda") or torch.cuda.is_bf16_supported(False) else "float16"
    times = _try_all(base)
    (threads, best), seconds = min(times.items(), key=lambda one: one[1])
    torch.set_num_threads(threads)
    slowest = max(times.values()) / seconds
    LOGGER.warning("%s with %d threads is fastest here, by a factor of up to %.1f.", best, threads, slowest)
    return best


def _try_all(base: ModelName) -> dict[tuple[int, str], float]:
    """The seconds of a step of the base model's first layers, with random weights, by threads and data type."""
    config = load_config(base)
    truncate(config, min(2, config.num_hidden_layers))
    lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    usual = torch.get_num_threads()
    times: dict[tuple[int, str], float] = {}
    for dtype, threads in product(("float32", "bfloat16"), sorted({1, (usual + 1) // 2, usual})):
        torch.set_num_threads(threads)
        times[threads, dtype] = _time_step(lm.to(getattr(torch, dtype)))
    torch.set_num_threads(usual)
    return times


@torch.no_grad()
def _time_step(lm: PreTrainedModel) -> float:
    """The shortest of some steps of one token; the first one prepares things."""
    tokens = torch.zeros(1, 1, dtype=torch.long)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        lm(input_ids=tokens, use_cache=False)
        seconds.append(time.perf_counter() - began)
    return min(seconds)
