"""The cost of frozen embeddings: a lower bound of the error of every RAD-Q with a linear head, whatever it learns.

    r̂(v | x) = ⟨h, w⟩ + ⟨h, W e(v)⟩ = a constant + a linear function of e(v)

h, w and W are learnt; the output embedding E with its rows e(v) is frozen. So after a prefix x the rewards of the
tokens lie in the span of the columns of E and the constant. The residual of the least-squares fit of the row R[x, ·]
to [E, 1], restricted to the tokens observed there, is an error that no training removes. Each attribute has its own w
and W, and so its own residual.

A row whose tokens have linearly independent rows of [E, 1] is met exactly and costs nothing. More than d + 1 tokens
cannot be independent. Most rows are short, so independence is proved in batches with a Cholesky factorisation. Only for
the other rows the least-squares problem is solved, with singular values. Everything is computed in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from radq.errors import ModelError, VocabularyError
from radq.models.loading import load_config, load_output_embedding
from radq.models.vocabulary import Vocabulary, read_vocabulary
from radq.numerics import require_memory
from radq.rank.completion import NUMBERS_PER_CHUNK, group_entries
from radq.rank.matrix import RewardMatrix, concatenate_ranges
from radq.sources.model_source import ModelName, ModelSource

ROUNDING = 1e-8  # a residual below this share of its row is a rounding error, and counts as 0


@dataclass(frozen=True)
class BoundedRow:
    """A prefix after which frozen embeddings leave an error in one attribute."""

    prefix: str
    attribute: str
    continuations: int
    variance: float  # of the values in the row: the error of the best constant
    mse: float  # error of the best constant plus linear function of e(v)
    weighted_loss: float  # the part of the row in `Bounds.weighted_loss`


@dataclass(frozen=True)
class Bounds:
    """Lower bounds over one attribute or several: errors are means over their entries, losses are sums as in training.

    N is the number of utterances.
    """

    mse_omega2: float  # over the entries of Ω_2
    mse_omega: float  # over all entries; those outside Ω_2 have no error
    weighted_loss: float  # (1/N) Σ_entries Λ (r̂ − R)², with Λ = Σ λ over the utterances of an entry
    contradiction_loss: float  # (1/N) Σ λ (y − R)², where utterances contradict each other; it bounds RAD-V too


@dataclass(frozen=True)
class AttributeBound(Bounds):
    attribute: str


@dataclass(frozen=True)
class EmbeddingBound(Bounds):
    hidden_size: int
    costly_rows: int  # number of rows, over all attributes, whose error cannot be 0
    attributes: list[AttributeBound]
    rows: list[BoundedRow]  # the rows with the largest errors, largest first


class _Continuations(NamedTuple):
    """The tokens that follow each prefix of Ω_2, with the values of all attributes and the weights of the entries."""

    starts: Int[np.ndarray, " bounds"]
    tokens: Int[np.ndarray, " s"]
    values: Float[np.ndarray, "s a"]
    weights: Float[np.ndarray, " s"]

    @classmethod
    def of(cls, matrix: RewardMatrix) -> "_Continuations":
        a = len(matrix.attributes)
        sizes = np.diff(matrix.starts)[matrix.omega2_rows] // a
        first = concatenate_ranges(matrix.starts[matrix.omega2_rows], sizes)  # entries of the first attribute
        all_attributes = first[:, None] + np.arange(a) * np.repeat(sizes, sizes)[:, None]  # (s, a)
        assert matrix.weights is not None
        starts, tokens = np.concatenate([[0], np.cumsum(sizes)]), matrix.columns[first].astype(np.int64)
        return cls(starts, tokens, matrix.values[all_attributes], matrix.weights[first])


def bound_by_backbone(matrix: RewardMatrix, backbone: str, progress: bool = False) -> EmbeddingBound | None:
    """Lower bounds of the error of RAD-Q over a backbone; None for a matrix that does not say what its tokens are."""
    if matrix.vocabulary is None:
        return None
    source = ModelSource.find(backbone)
    check_backbone_tokens(source, matrix.vocabulary)
    embedding = load_output_embedding(source)
    highest = int(matrix.tokens.max())
    if highest >= len(embedding):
        raise VocabularyError(
            f"token ids must be less than {len(embedding)}, the rows of the output embedding of {backbone!r}, but the "
            f"data have the token {highest}.",
            "use the tokenizer that the backbone was trained with.",
        )
    tokenizer = source.find_tokenizer()
    decode = str if tokenizer is None else lambda tokens: str(tokenizer.decode(tokens))
    return bound_by_embedding(matrix, embedding, decode, progress=progress)


def check_backbone_tokens(backbone: ModelName, vocabulary: Vocabulary) -> None:
    """Refuse a backbone whose token ids mean something else: its embeddings would belong to other tokens."""
    source = ModelSource.find(backbone)
    tokenizer = source.find_tokenizer()
    if tokenizer is None:
        same = getattr(load_config(source).get_text_config(), "vocab_size", None) == vocabulary.size
    else:
        same = read_vocabulary(vocabulary.num_tokens or 0, tokenizer).fingerprint == vocabulary.fingerprint
    if not same:
        raise VocabularyError(
            f"the tokens of the matrix are not those of the backbone {str(backbone)!r}.",
            "leave --tokenizer out to use that of the backbone, or leave --backbone out to compute ranks only.",
        )


def bound_by_embedding(
    matrix: RewardMatrix,
    embedding: Float[Tensor, "v d"],
    decode: Callable[[Sequence[int]], str] = str,
    max_rows: int = 100,
    progress: bool = False,
) -> EmbeddingBound:
    """Lower bounds of the error of RAD-Q with a linear head and this embedding, and the `max_rows` worst rows."""
    entries, a = _Continuations.of(matrix), len(matrix.attributes)
    squares, weighted = _measure_rows(entries, embedding, progress)  # (n, a) each
    losses = weighted / matrix.utterances
    assert matrix.contradictions is not None
    contradictions = matrix.contradictions / matrix.utterances  # (a,)
    in_omega2, in_omega = max(1, len(entries.tokens)), matrix.entries // a
    costs = np.argsort(-squares, axis=None, kind="stable")[: min(max_rows, int((squares > 0).sum()))]

    def bound(columns: slice) -> dict[str, Any]:
        mean = float(squares[:, columns].sum(0).mean())
        return {
            "mse_omega2": mean / in_omega2,
            "mse_omega": mean / in_omega,
            "weighted_loss": float(losses[:, columns].sum()),
            "contradiction_loss": float(contradictions[columns].sum()),
        }

    def describe(row: int, column: int) -> BoundedRow:
        values = entries.values[entries.starts[row] : entries.starts[row + 1], column]
        return BoundedRow(
            prefix=decode(matrix.omega2_prefix(row)),
            attribute=matrix.attributes[column],
            continuations=len(values),
            variance=float(values.var()),
            mse=float(squares[row, column]) / len(values),
            weighted_loss=float(losses[row, column]),
        )

    return EmbeddingBound(
        **bound(slice(None)),
        hidden_size=embedding.shape[1],
        costly_rows=int((squares > 0).sum()),
        attributes=[
            AttributeBound(**bound(slice(n, n + 1)), attribute=name) for n, name in enumerate(matrix.attributes)
        ],
        rows=[describe(*divmod(int(cell), a)) for cell in costs],
    )


def _measure_rows(
    entries: _Continuations, embedding: Float[Tensor, "v d"], progress: bool
) -> tuple[Float[np.ndarray, "n a"], Float[np.ndarray, "n a"]]:
    """The squared residuals of each row and attribute, plain ones and those of the fit with the weights of entries."""
    squares = np.zeros((len(entries.starts) - 1, entries.values.shape[1]))
    weighted = np.zeros_like(squares)
    if not len(squares):
        return squares, weighted
    features, columns = _token_features(entries.tokens, embedding)
    dependent = np.flatnonzero(~_independent_rows(entries.starts, columns, features))
    for row in tqdm(dependent, desc="frozen embeddings", unit="prefix", disable=not progress, leave=False):
        part = slice(entries.starts[row], entries.starts[row + 1])
        x, y = features[torch.from_numpy(columns[part])], torch.from_numpy(entries.values[part])
        squares[row] = least_squares(x, y)
        weighted[row] = least_squares(x, y, torch.from_numpy(entries.weights[part]))
    return squares, weighted


def least_squares(
    x: Float[Tensor, "k f"], y: Float[Tensor, "k a"], weights: Float[Tensor, " k"] | None = None
) -> Float[np.ndarray, " a"]:
    """min Σ_k weight_k (y_k − ⟨x_k, q⟩)² over q, for each column of y.

    Singular values below max(k, f) · eps times the largest count as 0, as in numpy and LAPACK.
    """
    if weights is not None:
        roots = weights.sqrt()[:, None]
        x, y = roots * x, roots * y
    cutoff = max(x.shape) * torch.finfo(torch.float64).eps
    solution = torch.linalg.lstsq(x, y, rcond=cutoff, driver="gelsd").solution
    squares = (y - x @ solution).square().sum(0)
    return torch.where(squares > ROUNDING**2 * y.square().sum(0), squares, 0.0).numpy()


def _token_features(
    tokens: Int[np.ndarray, " s"], embedding: Float[Tensor, "v d"]
) -> tuple[Float[Tensor, "m f"], Int[np.ndarray, " s"]]:
    """The rows of [E, 1] of the tokens that occur, and for each entry the index of its row.

    The constant is the mean length of an embedding instead of 1: the span is the same and better conditioned.
    """
    used, columns = np.unique(tokens, return_inverse=True)
    m, f = len(used), embedding.shape[1] + 1
    require_memory(3 * m * f * torch.float64.itemsize, "cpu", f"the embeddings of {m} tokens in float64")
    rows = embedding[torch.from_numpy(used).to(embedding.device)].to("cpu", torch.float64)
    if not bool(torch.isfinite(rows).all()):
        raise ModelError(
            "the output embedding of the backbone holds numbers that are not finite.",
            "check its weight files, or choose another backbone.",
        )
    constant = rows.norm(dim=1).mean().clamp(min=torch.finfo(torch.float64).tiny ** 0.5)
    return torch.cat([rows, constant.expand(m, 1)], dim=1), columns


def _independent_rows(
    starts: Int[np.ndarray, " bounds"], columns: Int[np.ndarray, " s"], features: Float[Tensor, "m f"]
) -> Bool[np.ndarray, " n"]:
    """True for rows whose tokens are proved to have linearly independent features.

    With unit vectors and their Gram matrix G (k × k), G − τ is positive definite only if the smallest eigenvalue of G
    is above τ. As τ exceeds the rounding errors of the factorisation, a factorisation that succeeds is a proof.
    """
    sizes = np.diff(starts)
    independent = np.zeros(len(sizes), dtype=bool)
    short = np.repeat(sizes <= features.shape[1], sizes)
    rows = np.repeat(np.arange(len(sizes)), sizes)[short]
    units = F.normalize(features, dim=1)
    padded = F.pad(units, (0, 0, 0, 1))
    for group in group_entries(rows, columns[short], np.zeros(len(rows)), units):
        k = group.neighbours.shape[1]
        threshold = 4 * k * (k + 1) * torch.finfo(torch.float64).eps
        step = max(1, NUMBERS_PER_CHUNK["cpu"] // (k * (features.shape[1] + k)))
        for first in range(0, len(group.rows), step):
            neighbours = group.neighbours[first : first + step]  # (b, k)
            vectors = F.embedding(neighbours, padded)  # (b, k, f)
            gram = vectors @ vectors.mT
            gram.diagonal(dim1=1, dim2=2).add_((neighbours == len(units)).double() - threshold)
            failed = torch.linalg.cholesky_ex(gram).info
            independent[group.rows[first : first + step].numpy()] = (failed == 0).numpy()
    return independent
