"""Short names for contents: what differs has another one."""

import hashlib
import json
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

LENGTH = 24  # hexadecimal digits


def fingerprint(*values: object) -> str:
    """Of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:LENGTH]


def fingerprint_arrays(arrays: Iterable[np.ndarray]) -> str:
    """Of numbers, their shapes and types."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(memoryview(np.ascontiguousarray(array)).cast("B") if array.size else b"")
    return digest.hexdigest()[:LENGTH]


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Of the named tensors of a model, wherever they lie."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return digest.hexdigest()[:LENGTH]
