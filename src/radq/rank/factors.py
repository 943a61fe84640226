"""Factors of a low-rank matrix, and the file that lets anybody check what they are worth."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from radq.errors import DataError
from radq.files import whole_file
from radq.rank.matrix import Observed

NUMBERS_PER_CHUNK = 2**24


@dataclass(frozen=True)
class Factors:
    """A Bᵀ has rank r at most; that it is near the observed entries certifies that such a matrix exists."""

    a: Float[Tensor, "n r"]
    b: Float[Tensor, "m r"]

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    def mse(self, observed: Observed) -> float:
        """Over the observed entries, in float64, a piece at a time."""
        device, squares = self.a.device, 0.0
        step = max(1, NUMBERS_PER_CHUNK // max(1, self.rank))
        for first in range(0, len(observed), step):
            rows, columns, values = (
                torch.from_numpy(part[first : first + step]).to(device)
                for part in (observed.rows, observed.columns, observed.values)
            )
            products = (self.a[rows].double() * self.b[columns].double()).sum(1)
            squares += float((values - products).square().sum())
        return squares / len(observed)

    def save(self, file: str | Path, observed: Observed) -> None:
        """As safetensors, with a fingerprint of the entries they were fitted to."""
        tensors = {"A": self.a.cpu().contiguous(), "B": self.b.cpu().contiguous()}
        with whole_file(file) as temporary:
            try:
                save_file(tensors, temporary, metadata={"matrix": fingerprint(observed)})
            except SafetensorError as error:  # a full disk, say
                raise DataError(f"{str(file)!r} cannot be written: {error}.", "is there room on the disk?") from error

    @classmethod
    def load(cls, file: str | Path, observed: Observed) -> "Factors":
        """Read factors and make sure that they belong to the entries."""
        try:
            with safe_open(file, "pt") as stored:
                a, b = stored.get_tensor("A"), stored.get_tensor("B")
                matrix = (stored.metadata() or {}).get("matrix")
        except (OSError, SafetensorError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".: ")
            raise DataError(
                f"{str(file)!r} cannot be read as a certificate: {reason}.",
                "`radq rank data --certificates` makes them.",
            ) from error
        wanted = [(size, *a.shape[1:2]) for size in observed.shape]
        if [tuple(a.shape), tuple(b.shape)] != wanted or matrix != fingerprint(observed):
            raise DataError(
                f"the certificate {str(file)!r} ({tuple(a.shape)} and {tuple(b.shape)}) does not belong to this matrix "
                f"of {observed.shape[0]} × {observed.shape[1]} with {len(observed)} entries.",
                "give the matrix that was saved with it: same data, tokenizer, label and options.",
            )
        if not all(bool(torch.isfinite(part).all()) for part in (a, b)):
            raise DataError(f"the certificate {str(file)!r} is not finite.", "make it anew.")
        return cls(a, b)


def fingerprint(observed: Observed) -> str:
    digest = hashlib.sha256(f"{observed.shape}".encode())
    for part in (observed.rows, observed.columns, observed.values):
        digest.update(part.tobytes())
    return digest.hexdigest()
