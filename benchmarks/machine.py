"""The machine a benchmark runs on: its name, and a clock that waits for a GPU."""

import time

import torch


def describe_machine(device: str) -> str:
    """The name of the GPU, or the number of CPU threads."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def read_clock(device: str) -> float:
    """Seconds, after all work on the device is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()
