"""Instruments that several tests share: a full disk, the largest tensor of a computation, operations of a step."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
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


WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default", "is_nonzero")


class CountWaiting(TorchDispatchMode):
    """Counts operations whose result the host must wait for on a GPU."""

    def __init__(self, names: tuple[str, ...] = WAITING) -> None:
        super().__init__()
        self.names = names
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in self.names):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class CountKernels(TorchDispatchMode):
    """Counts operations that compute something: not those that make empty tensors or views of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if not (func.is_view or "empty" in name or name in ("aten._unsafe_view.default", "aten.promote_types.default")):
            self.found.append(name)
        return result


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


class FailOnce(TorchDispatchMode):
    """Lets one operation find no memory: the one with this number among all that run in the mode.

    After it, operations run without the mode, which takes most of their time.
    """

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.number, self.count = number, 0

    def __enter__(self) -> "FailOnce":
        self._counts = self.number is None or self.count <= self.number
        return super().__enter__() if self._counts else self

    def __exit__(self, *error: Any) -> None:
        if self._counts:
            super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count - 1 == self.number:
            raise torch.OutOfMemoryError("no memory for this operation")
        return func(*args, **(kwargs or {}))
