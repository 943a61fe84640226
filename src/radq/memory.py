"""How much memory there is, and how much was used."""

import resource
import sys
from pathlib import Path

import torch

from radq.errors import MemoryLimitError


def available_memory(device: str = "cpu") -> int | None:
    """Bytes that can still be allocated; None where the system does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def require_memory(num_bytes: int, device: str, what: str, hint: str = "use a machine with more memory.") -> None:
    """Raise before an allocation that cannot succeed."""
    available = available_memory(device)
    if available is not None and num_bytes > available:
        raise MemoryLimitError(f"{what} takes {num_bytes / 2**30:.1f} GiB of {available / 2**30:.1f} GiB.", hint)


def peak_memory(device: str = "cpu") -> int:
    """The most bytes this process has held: of the GPU, or of main memory."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
