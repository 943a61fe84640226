"""Upcasting, log-probabilities of tokens, padding of token ids, memory of the machine."""

import gc
import math
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from radq.errors import MemoryLimitError

# Tensors that pass through many hands, by their axes: b rows, t time, p positions, k candidates, s strengths.
Texts = Int[Tensor, "b t"]  # token ids, or their mask
Tokens = Int[Tensor, " b"]
Positions = Int[Tensor, "b p"]
Candidates = Int[Tensor, "b k"]
PlacedCandidates = Int[Tensor, "b p k"]
Strengths = Float[Tensor, "b s"]
Padded = tuple[Texts, Texts]

P = ParamSpec("P")
T = TypeVar("T")

LOGITS_AT_ONCE = 2**26  # that are upcast together
LOGITS_PER_FORWARD = {"cpu": 2**26, "cuda": 2**29}  # that a language model computes together, by device

# --- tensors ---


def at_least_float32(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Upcast half precision; leave float32 and float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_probabilities(logits: Float[Tensor, "*p v"], token_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p"]:
    """Log-probability of one token at each position; gradients need at least one axis before the vocabulary."""
    if not torch.is_grad_enabled():
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return logits.log_softmax(-1, dtype=dtype).gather(-1, token_ids[..., None]).squeeze(-1)
    result: Any = _LogProbabilities.apply(logits, token_ids)
    return result


class _LogProbabilities(torch.autograd.Function):
    """Log-probabilities whose gradients need no more than the logits.

    Logits of a large vocabulary take most of the memory of a training step. They are upcast piece by piece here, so
    that neither a float32 copy of them nor one of their gradients is ever whole.
    """

    @staticmethod
    def forward(ctx: Any, logits: Float[Tensor, "*p v"], token_ids: Int[Tensor, "*p"]) -> Float[Tensor, "*p"]:
        pieces = [
            (at_least_float32(part).logsumexp(-1), at_least_float32(part.gather(-1, tokens[..., None]).squeeze(-1)))
            for part, tokens in _pieces(logits, token_ids)
        ]
        normaliser = torch.cat([normaliser for normaliser, _ in pieces])
        ctx.save_for_backward(logits, token_ids, normaliser)
        return torch.cat([chosen for _, chosen in pieces]) - normaliser

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names of parameters
        ctx: Any, *gradients: Float[Tensor, "*p"]
    ) -> tuple[Float[Tensor, "*p v"], None]:
        """The gradient of log softmax: 1 for the token itself, minus the probability of each token."""
        logits, token_ids, normaliser = ctx.saved_tensors
        found = torch.empty_like(logits)
        for part, tokens, log_sum, gradient, into in _pieces(logits, token_ids, normaliser, *gradients, found):
            change = (at_least_float32(part) - log_sum[..., None]).exp_().mul_(-gradient[..., None])
            into.copy_(change.scatter_add_(-1, tokens[..., None], gradient[..., None]))
        return found, None


def _pieces(logits: Float[Tensor, "*p v"], *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut tensors along their first axis, so that few logits are in a piece."""
    rows = max(1, LOGITS_AT_ONCE // max(1, logits[:1].numel()))
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


def enlarge(values: Tensor, *shape: int, fill: float = 0) -> Tensor:
    """A tensor of a larger shape that begins with the given one; main memory is taken up where it is written."""
    size = math.prod(shape) * values.element_size()
    if values.device.type == "cpu" and size:  # the system gives such zeros page by page
        larger = torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(values.dtype).view(shape)
    else:
        larger = values.new_zeros(shape)
    if fill:
        larger.fill_(fill)
    larger[tuple(map(slice, values.shape))] = values
    return larger


@cache
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers that never change. It is made once: copying numbers to a GPU makes the program wait for it,
    and cannot be captured in a graph."""
    return torch.tensor(values, dtype=dtype, device=device)


def weakly_cached(function: Callable[P, T]) -> Callable[P, T]:
    """Remember the answers of a function about an object for as long as this object, its first argument, lives."""
    answers: WeakKeyDictionary[Any, dict[tuple[object, ...], T]] = WeakKeyDictionary()

    @wraps(function)
    def answer(*arguments: P.args, **options: P.kwargs) -> T:
        known, others = answers.setdefault(arguments[0], {}), arguments[1:]
        if others not in known:
            known[others] = function(*arguments, **options)
        return known[others]

    return answer


def state_of(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies, and how often torch has noticed that it was changed in place."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def take_last(values: Float[Tensor, "b t a"], mask: Texts) -> Float[Tensor, "b a"]:
    """Values at the last position of each row where the mask is 1, such as the rewards of whole texts."""
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
    return values[torch.arange(len(last), device=last.device), last]


def pad_left(
    texts: Sequence[Sequence[int]],
    pad_id: int = 0,
    device: torch.device | str | None = None,
    side: Literal["left", "right"] = "left",
) -> Padded:
    """Batch token ids of texts of different lengths, with padding before the shorter ones.

    Returns input_ids, with `pad_id` at padding, and attention_mask, with 0 at padding and 1 elsewhere.
    """
    rows = [torch.tensor(text, dtype=torch.long) for text in texts]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=pad_id, padding_side=side)
    attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return input_ids.to(device), attention_mask.to(device)


def pad_right(texts: Sequence[Sequence[int]], pad_id: int = 0, device: torch.device | str | None = None) -> Padded:
    """Batch token ids as `pad_left` does, but with padding after the shorter texts."""
    return pad_left(texts, pad_id, device, "right")


def leading(input_ids: Texts, attention_mask: Texts, token: int) -> Bool[Tensor, "b t"]:
    """Marks the first real token of each row where it is `token`, such as the BOS that some tokenizers add."""
    return (attention_mask.cumsum(1) == 1) & (attention_mask == 1) & (input_ids == token)


def leave_out_unknown(input_ids: Texts, attention_mask: Texts | None, num_known: int) -> Padded:
    """Turn tokens with ids of `num_known` or more into padding."""
    known = input_ids < num_known
    return input_ids * known, known.long() if attention_mask is None else attention_mask.long() * known


def pack_right(input_ids: Texts, attention_mask: Texts) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Move the real tokens of every row to its right end, with no more padding on the left than the longest needs."""
    longest = int(attention_mask.sum(1).max())
    order = attention_mask.argsort(dim=1, stable=True)[:, attention_mask.shape[1] - longest :]
    return input_ids.gather(1, order), attention_mask.gather(1, order)


@dataclass(frozen=True)
class LeftPacked:
    """Texts with their real tokens first: causal attention then needs neither mask nor positions."""

    input_ids: Texts
    order: Texts  # where each token came from

    def pack(self, values: Texts) -> Texts:
        return values.gather(1, self.order)

    def unpack(self, values: Float[Tensor, "b t a"]) -> Float[Tensor, "b t a"]:
        """Move values that were computed in packed order back to the places of their tokens."""
        return values.gather(1, self.order.argsort(dim=1)[..., None].expand_as(values))


def pack_left(input_ids: Texts, attention_mask: Texts) -> LeftPacked:
    order = (1 - attention_mask).argsort(dim=1, stable=True)
    return LeftPacked(input_ids.gather(1, order), order)


# --- kernels of the CPU ---


def emulates(dtype: torch.dtype, device: str | torch.device) -> bool:
    """Whether a CPU has no instructions for a data type: it then takes tens of times as long as in float32."""
    if torch.device(device).type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    # Kernels for float16 count as supported on some CPUs where they are as slow.
    has_bfloat16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 or not has_bfloat16


@contextmanager
def without_emulation_notice() -> Iterator[None]:
    """Hide torch's warning that the CPU has no bfloat16 instructions: results are the same, they only take longer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        yield


@contextmanager
def same_kernels() -> Iterator[None]:
    """Make results inside the block independent of what the process computed before. It is a decorator, too.

    On a CPU without bfloat16 instructions, torch turns its oneDNN kernels off for the rest of the process at the first
    product in bfloat16, and the other kernels round differently. Every block begins with these kernels turned on.
    """
    kernels: Any = torch.backends.mkldnn
    before = kernels.enabled
    kernels.enabled = True
    try:
        yield
    finally:
        kernels.enabled = before


@contextmanager
def collecting_later() -> Iterator[None]:
    """Let no garbage be collected inside the block: a CUDA graph that is deleted during a capture ends the capture."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


# --- memory ---


def available_memory(device: str = "cpu") -> int | None:
    """Bytes that can still be allocated on a device; None if the system does not tell."""
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
    """Raise an error before an allocation that cannot succeed. `what` names in the error what is to be allocated."""
    available = available_memory(device)
    if available is not None and num_bytes > available:
        raise MemoryLimitError(
            f"{what} takes {num_bytes / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB of memory are free.", hint
        )


def require_memory_for_texts(num_texts: int, num_tokens: int, hint: str) -> None:
    """Raise an error before generating more texts than main memory can hold with their numbers per token."""
    num_bytes = num_texts * (500 + 50 * num_tokens)  # roughly what Python's objects take
    require_memory(min(num_bytes, 2**100), "cpu", "keeping all texts with their numbers", hint)


def texts_per_forward(logits_per_text: int, device: torch.device) -> int:
    """The number of texts whose logits a forward may compute together, so that they do not fill the memory."""
    return max(1, LOGITS_PER_FORWARD.get(device.type, LOGITS_PER_FORWARD["cpu"]) // logits_per_text)


def in_smaller_batches(work: Callable[[int], T], size: int) -> tuple[T, int]:
    """Call `work(size)`, halving size when the GPU runs out of memory; return the result and the size that fitted."""
    while True:
        try:
            return work(size), size
        except torch.OutOfMemoryError as error:
            if size == 1:
                raise MemoryLimitError(
                    "the GPU has no memory for a single text.", "use a smaller dtype, or end other programs on it."
                ) from error
        size = size // 2
        empty_cache()
        warnings.warn(f"the GPU's memory is full, so radq reads {size} texts at once from now on.", stacklevel=2)


def empty_cache() -> None:
    """Release memory that torch has reserved on the accelerator and does not use."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def reset_peak_memory(device: str) -> None:
    """Begin to measure a GPU's peak memory anew. The peak of main memory always covers the whole process."""
    if torch.device(device).type in ("cuda", "xpu"):
        torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(device: str = "cpu") -> int:
    """The largest number of bytes this process has held on the device."""
    kind = torch.device(device).type
    if kind in ("cuda", "xpu"):
        return torch.accelerator.max_memory_allocated(device)
    if kind == "mps":
        return torch.mps.driver_allocated_memory()  # the current value: Apple's GPUs record no peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
