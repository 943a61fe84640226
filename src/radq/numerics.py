"""Half precision, token log-probabilities, and the memory of a machine."""

import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from radq.errors import MemoryLimitError


def precise(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """In float32 or better."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_probabilities(logits: Float[Tensor, "*p v"], tokens: Int[Tensor, "*p"]) -> Float[Tensor, "*p"]:
    """Of one token at each place, over the whole vocabulary. log_softmax makes one pass, logsumexp several."""
    return precise(logits).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


@contextmanager
def without_emulation_notice() -> Iterator[None]:
    """Hide torch's warning that a CPU has no bfloat16 of its own: the numbers are the same, it only takes longer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        yield


@contextmanager
def same_kernels() -> Iterator[None]:
    """Make the results inside the block independent of what the process has computed before; also a decorator.

    On a CPU without bfloat16, torch turns its oneDNN kernels off for the rest of the process at the first product in
    bfloat16, and other kernels round differently. Here they are on at the beginning.
    """
    kernels: Any = torch.backends.mkldnn
    before = kernels.enabled
    kernels.enabled = True
    try:
        yield
    finally:
        kernels.enabled = before


T = TypeVar("T")


def available_memory(device: str = "cpu") -> int | None:
    """Bytes that can still be allocated; None where the system does not say."""
    kind = torch.device(device).type
    if kind in ("cuda", "xpu"):
        return getattr(torch, kind).mem_get_info(device)[0]
    if kind == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
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


def require_memory_for_texts(num_texts: int, num_tokens: int, hint: str) -> None:
    """Raise before texts are drawn that, with their numbers per token, cannot be kept in main memory."""
    num_bytes = num_texts * (500 + 50 * num_tokens)  # Python's objects, roughly
    require_memory(min(num_bytes, 2**100), "cpu", "keeping all texts with their numbers", hint)


def in_smaller_batches(work: Callable[[int], T], size: int) -> tuple[T, int]:
    """What work on so many texts at once gives, and how many fitted: half of them, and so on, where memory runs out."""
    while True:
        try:
            return work(size), size
        except torch.OutOfMemoryError as error:
            if size == 1:
                raise MemoryLimitError(
                    "the GPU has no memory for a single text.", "use a smaller dtype, or see what else runs on it."
                ) from error
        size = size // 2
        empty_cache()
        warnings.warn(f"the GPU's memory is full: {size} texts at once from now on.", stacklevel=2)


def empty_cache() -> None:
    """Give memory that torch keeps for later back to the accelerator, where there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def reset_peak_memory(device: str) -> None:
    """Count the peak of a GPU from here on; that of main memory, and of Apple's GPUs, is of the whole process."""
    if torch.device(device).type in ("cuda", "xpu"):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(device: str = "cpu") -> int:
    """The most bytes this process has held: of the GPU, or of main memory."""
    kind = torch.device(device).type
    if kind in ("cuda", "xpu"):
        return torch.accelerator.max_memory_allocated(device)
    if kind == "mps":
        return torch.mps.driver_allocated_memory()  # now: Apple's GPUs keep no peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
