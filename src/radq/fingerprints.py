"""Short names for contents: what differs has another one."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

LENGTH = 24  # hexadecimal digits


def fingerprint(*values: object) -> str:
    """The fingerprint of values that JSON can hold."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:LENGTH]


def fingerprint_arrays(arrays: Iterable[np.ndarray]) -> str:
    """The fingerprint of arrays: their numbers, shapes and types."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        values: Any = np.ascontiguousarray(array)
        digest.update(values.data.cast("B") if array.size else b"")
    return digest.hexdigest()[:LENGTH]


def fingerprint_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The fingerprint of named tensors, on any device; the caller sorts them by name."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        values: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(values.data)
    return digest.hexdigest()[:LENGTH]
