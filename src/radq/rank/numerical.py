"""Numerical rank of a trained model: how many directions its rewards really use.

N prefixes are drawn from the data, each fills a row with the rewards of all tokens, and the rank is the number of
singular values above max(N, |V|) · eps · σ_1, with eps that of the dtype the model computed in: the cutoff of numpy and
PyTorch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from radq.data.dataset import RewardData
from radq.errors import DataError, OptionError
from radq.models.reward import RewardModel
from radq.numerics import require_memory


@dataclass(frozen=True)
class NumericalRank:
    num_rows: int
    rank: int
    cutoff: float
    spectrum: list[float]  # singular values, largest first


def sample_prefixes(data: RewardData, n: int, max_tokens: int | None, seed: int) -> list[np.ndarray]:
    """Prefixes drawn independently, each of those in the data as likely as another; the empty one is among them."""
    lengths = data.lengths if max_tokens is None else np.minimum(data.lengths, max_tokens)
    ends = np.cumsum(lengths)
    if not len(ends) or not ends[-1]:
        raise DataError("the texts have no tokens to draw prefixes from.", "give --data with longer texts.")
    picks = np.random.default_rng(seed).integers(ends[-1], size=n)
    utterances = np.searchsorted(ends, picks, side="right")
    sizes = picks - (ends - lengths)[utterances]  # 0 to length - 1: what precedes a token
    starts = data.offsets[data.rows[utterances]]
    return [np.asarray(data.token_ids[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


@torch.no_grad()
def reward_rows(
    model: RewardModel, prefixes: Sequence[np.ndarray], attribute: str, batch_size: int = 16, progress: bool = False
) -> Float[Tensor, "n v"]:
    """Rewards of the whole vocabulary after each prefix, as guides see them but for clamping."""
    column = model.config.attributes.index(attribute)
    n, v = len(prefixes), model.vocabulary.size
    dtype = torch.promote_types(model.dtype, torch.float32)
    require_rows(n, v)
    rows = torch.empty(n, v, dtype=dtype)
    by_length = sorted(range(n), key=lambda index: len(prefixes[index]))  # little padding
    for first in tqdm(range(0, n, batch_size), desc="rewards", unit="batch", disable=not progress):
        chosen = by_length[first : first + batch_size]
        longest = max(len(prefixes[index]) for index in chosen)
        tokens = np.zeros((len(chosen), longest), np.int64)
        mask = np.zeros_like(tokens)
        for row, index in enumerate(chosen):
            size = len(prefixes[index])
            tokens[row, longest - size :], mask[row, longest - size :] = prefixes[index], 1
        ids, attention = (torch.from_numpy(array).to(model.device) for array in (tokens, mask))
        rows[chosen] = model.next_rewards(ids, attention)[..., column].to("cpu", dtype)
    return rows


def require_rows(n: int, v: int) -> None:
    """Refuse more rows of rewards than memory holds."""
    what = f"a matrix of {n} × {v} rewards and its factorisation"
    require_memory(3 * n * v * torch.float64.itemsize, "cpu", what, "use fewer --rows.")


def numerical_ranks(
    rows: Float[Tensor, "n v"], sizes: Sequence[int], eps: float, device: str = "cpu"
) -> list[NumericalRank]:
    """Ranks of the first N rows, for each N.

    With rowsᵀ = Q R, the first N rows have the singular values of the first N columns of R, which is small.
    """
    if not sizes or min(sizes) < 1 or max(sizes) > len(rows):
        raise OptionError(f"the numbers of rows are {list(sizes)}.", f"give 1 to {len(rows)}.")
    reduced = torch.linalg.qr(rows.T.to(device, torch.float64), mode="r").R  # (min(n, v), n)
    results = []
    for n in sizes:
        spectrum = torch.linalg.svdvals(reduced[:, :n])
        cutoff = max(n, rows.shape[1]) * eps * float(spectrum[0])
        results.append(NumericalRank(n, int((spectrum > cutoff).sum()), cutoff, spectrum.tolist()))
    return results
