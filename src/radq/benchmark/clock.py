"""The machine that a benchmark runs on: its name, and a clock that waits for a GPU."""

import platform
import time
from pathlib import Path

import torch


def describe_machine(device: str) -> str:
    """The name of the GPU, or of the processor with the number of threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads of {_processor() if device == 'cpu' else device}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def read_clock(device: str) -> float:
    """Seconds, after all work on the device is done."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))
    return time.perf_counter()
