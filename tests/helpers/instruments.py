"""Instruments that several tests share: a disk that is full, and the largest tensor that a computation makes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def full_disk(free_bytes: int) -> Iterator[None]:
    """Let every write beyond this size of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns; views of smaller storages (expanded ones) do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() >= value.element_size() * value.numel():
                self.numel = max(self.numel, value.numel())
                self.bytes = max(self.bytes, value.element_size() * value.numel())
        return result
