"""Numerical rank of a trained model: the number of directions that its rewards use.

N prefixes are drawn from the data, and each gives a row with the rewards of all tokens. The rank is the number of
singular values above max(N, |V|) · eps · σ_1, where eps is that of the dtype the model computed in. This is the cutoff
of numpy and PyTorch. It is high for large vocabularies (0.0059 · σ_1 for 49,152 tokens in float32), and another cutoff
gives another number, so the singular values above several shares of σ_1 are counted as well.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from radq.data.dataset import NO_LIMIT, RewardData, load_data
from radq.data.examples import DataColumns
from radq.errors import DataError, ModelError, require_package
from radq.files import atomic_folder
from radq.models.loading import find_device, hidden_size
from radq.models.reward import RewardModel
from radq.numerics import pad_left, require_memory
from radq.rank.config import ModelRankConfig

SHARES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of the largest singular value


@dataclass(frozen=True)
class ShareCount:
    """The number of singular values above a share of the largest one."""

    share: float
    count: int


@dataclass(frozen=True)
class NumericalRank:
    """The rank of the rewards after a number of prefixes."""

    num_rows: int
    rank: int
    cutoff: float
    counts: list[ShareCount]
    spectrum: list[float]  # singular values, largest first


@dataclass(frozen=True)
class ModelRanks:
    """Numerical ranks of one attribute of a reward model, for growing numbers of prefixes."""

    reward: str  # name or folder of the model
    kind: str
    attribute: str
    hidden_size: int
    vocabulary: int
    dtype: str
    tf32: bool  # whether the environment forced products of float32 into TF32, which has three digits
    ranks: list[NumericalRank]

    def save(self, folder: Path) -> None:
        """Write rank.json, and plots of the ranks and of the singular values of all prefixes, with d and the cutoff."""
        title, d, last = f"RAD-{self.kind.upper()}, {self.attribute}", self.hidden_size, self.ranks[-1]
        with atomic_folder(folder) as temporary:
            (temporary / "rank.json").write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")
            with _axes(temporary / "rank.png", "prefixes (rows)", "numerical rank") as axes:
                numbers = [rank.num_rows for rank in self.ranks]
                axes.plot(numbers, [rank.rank for rank in self.ranks], marker="o", label=title)
                axes.axhline(d, color="grey", linestyle="--", label=f"d = {d}")  # which no RAD-Q exceeds
                axes.set_xscale("log", base=2)
            with _axes(temporary / "spectrum.png", "singular value", "σ / σ_1") as axes:
                largest, numbers = last.spectrum[0] or 1.0, range(1, len(last.spectrum) + 1)
                (line,) = axes.plot(numbers, [value / largest for value in last.spectrum], label=title)
                axes.axhline(last.cutoff / largest, color=line.get_color(), linestyle=":", label=f"cutoff, {title}")
                axes.axvline(d, color="grey", linestyle="--", label=f"d = {d}")
                axes.set(xscale="log", yscale="log")


@contextmanager
def _axes(file: Path, x: str, y: str) -> Iterator[Any]:
    """Save a figure with these axes, which needs no display and changes no global state of matplotlib."""
    figure = require_package("matplotlib.figure", "report").Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    yield axes
    axes.legend()
    figure.savefig(file, dpi=150)


def measure_ranks(config: ModelRankConfig, progress: bool = False) -> ModelRanks:
    """Numerical ranks of a model's rewards after prefixes from the data, for each number of prefixes."""
    device, dtype = find_device(config.device), getattr(torch, config.dtype)
    model = RewardModel.from_pretrained(config.reward, device, dtype=dtype)
    if model.tokenizer is None:
        raise ModelError(f"{config.reward!r} has no tokenizer.", "copy the tokenizer files of its backbone into it.")
    attribute, sizes = config.attribute or model.config.attributes[0], config.sizes
    n, v = sizes[-1], model.vocabulary.size
    matrix = f"a matrix of {n} × {v} rewards and its factorisation"
    require_memory(3 * n * v * torch.float64.itemsize, "cpu", matrix, "use fewer --rows.")
    columns = DataColumns(config.text, skip_empty=config.skip_empty)
    data = load_data(config.data, model.tokenizer, columns, NO_LIMIT, config.cache, progress)
    context = model.reader.context
    max_tokens = None if context is None else context - 1  # one position is left for a candidate
    shortest = 0 if model.config.prepend_bos else 1  # without a BOS, a model has no state of an empty prefix
    prefixes = sample_prefixes(data, n, max_tokens, config.seed, shortest)
    with without_tf32():
        rows = reward_rows(model, prefixes, attribute, config.batch_size, progress)
    assert model.config.backbone is not None
    return ModelRanks(
        reward=config.reward,
        kind=model.config.kind,
        attribute=attribute,
        hidden_size=hidden_size(model.config.backbone),
        vocabulary=rows.shape[1],
        dtype=config.dtype,
        tf32=config.dtype == "float32" and is_tf32_forced(device),
        ranks=numerical_ranks(rows, sizes, torch.finfo(dtype).eps, device),
    )


@contextmanager
def without_tf32() -> Iterator[None]:
    """Multiply float32 matrices with all their digits inside the block: the rounding of TF32 looks like rank."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def is_tf32_forced(device: str) -> bool:
    """Whether NVIDIA's libraries use TF32 whatever PyTorch asks for."""
    return device.startswith("cuda") and os.environ.get("NVIDIA_TF32_OVERRIDE") == "1"


def sample_prefixes(data: RewardData, n: int, max_tokens: int | None, seed: int, shortest: int = 0) -> list[np.ndarray]:
    """Draw prefixes independently and uniformly from all prefixes in the data with at least `shortest` tokens.

    Texts are cut off after `max_tokens` tokens.
    """
    lengths = data.lengths if max_tokens is None else np.minimum(data.lengths, max_tokens)
    lengths = np.maximum(lengths - shortest, 0)
    ends = np.cumsum(lengths)
    if not len(ends) or not ends[-1]:
        raise DataError("the texts have no tokens to draw prefixes from.", "give --data with longer texts.")
    picks = np.random.default_rng(seed).integers(ends[-1], size=n)
    utterances = np.searchsorted(ends, picks, side="right")
    sizes = picks - (ends - lengths)[utterances] + shortest  # the number of tokens before a token
    starts = data.offsets[data.rows[utterances]]
    return [np.asarray(data.token_ids[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


@torch.no_grad()
def reward_rows(
    model: RewardModel, prefixes: Sequence[np.ndarray], attribute: str, batch_size: int = 16, progress: bool = False
) -> Float[Tensor, "n v"]:
    """Rewards of the whole vocabulary after each prefix. Guides use the same rewards, clamped to a range."""
    column = model.config.attributes.index(attribute)
    n, v = len(prefixes), model.vocabulary.size
    dtype = torch.promote_types(model.dtype, torch.float32)
    rows = torch.empty(n, v, dtype=dtype)
    by_length = sorted(range(n), key=lambda index: len(prefixes[index]))  # so that batches need little padding
    for first in tqdm(range(0, n, batch_size), desc="rewards", unit="batch", disable=not progress):
        chosen = by_length[first : first + batch_size]
        texts = pad_left([prefixes[index].tolist() for index in chosen], device=model.device)
        rows[chosen] = model.next_rewards(*texts)[..., column].to("cpu", dtype)
    return rows


def numerical_ranks(
    rows: Float[Tensor, "n v"], sizes: Sequence[int], eps: float, device: str = "cpu"
) -> list[NumericalRank]:
    """Ranks of the first N rows, for each N in `sizes`.

    With rowsᵀ = Q R, the first N rows have the singular values of the first N columns of R, which is small.
    """
    reduced = torch.linalg.qr(rows.T.to(device, torch.float64), mode="r").R  # (min(n, v), n)
    results = []
    for n in sizes:
        spectrum = torch.linalg.svdvals(reduced[:, :n])
        cutoff = max(n, rows.shape[1]) * eps * float(spectrum[0])
        values = spectrum.tolist()
        results.append(NumericalRank(n, int((spectrum > cutoff).sum()), cutoff, count_above(values), values))
    return results


def count_above(spectrum: Sequence[float], shares: Sequence[float] = SHARES) -> list[ShareCount]:
    """Count the singular values (largest first) above each share of the largest."""
    return [ShareCount(share, sum(value > share * spectrum[0] for value in spectrum)) for share in shares]
