"""Heads of reward models: they compute rewards of tokens from hidden states of the backbone.

Every head of RAD-Q has the form r̂_a(v|x) = baseline_a(h) + ⟨features_a(h), table[v]⟩ with the hidden state h = h(x).
Once the features are computed, a reward costs one dot product, and only the table rows of its tokens are read.

A head may be more precise than its backbone: hidden states and embeddings are converted to the head's dtype.

Axes: b batch, k candidates, v vocabulary, d hidden, a attributes; `*p` any number of position axes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from radq.errors import OptionError
from radq.numerics import Candidates, state_of


class ValueHead(nn.Linear):
    """The head of RAD-V: a linear layer with a bias that reads the hidden state of a token."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=1 / self.in_features)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Float[Tensor, "*p d"]) -> Float[Tensor, "*p a"]:  # pyright: ignore
        return super().forward(hidden.to(self.weight.dtype))


class LinearHead(nn.Module):
    """r̂_a(v|x) = ⟨h, w_a⟩ + ⟨h, W_a e(v)⟩, where e(v) is row v of the frozen output embedding E.

    Other heads inherit from this one and override `features`, `table` or `has_baseline`. E belongs to the model, which
    passes it to the methods.
    """

    has_baseline = True

    def __init__(self, hidden_size: int, num_attributes: int, vocab_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_attributes, hidden_size, hidden_size))  # (a, d, d): W_a
        if self.has_baseline:
            self.baseline_weight = nn.Parameter(torch.empty(num_attributes, hidden_size))  # (a, d): w_a

    def reset_parameters(self) -> None:
        """Draw initial weights. |h| |e| / d is below 1 for pretrained backbones, so rewards are small at first."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=1 / self.weight.shape[-1])

    def baseline(self, hidden: Float[Tensor, "*p d"]) -> Float[Tensor, "*p a"]:
        """The part of a reward that is the same for every next token."""
        if not self.has_baseline:
            return self.weight.new_zeros(*hidden.shape[:-1], len(self.weight))
        return F.linear(hidden.to(self.weight.dtype), self.baseline_weight)

    def features(self, hidden: Float[Tensor, "*p d"], embedding: Float[Tensor, "v d"]) -> Float[Tensor, "*p a d"]:
        """Vectors whose products with rows of the table are the marginal rewards of tokens."""
        return torch.einsum("...d,ade->...ae", hidden.to(self.weight.dtype), self.weight)  # W_aᵀ h

    def table(self, embedding: Float[Tensor, "v d"]) -> Float[Tensor, "v d"]:
        """One row per token, which is multiplied with the features."""
        return embedding


class LinearNoBaselineHead(LinearHead):
    """r̂_a(v|x) = ⟨h, W_a e(v)⟩, without a baseline."""

    has_baseline = False


@dataclass
class _Mixing:
    """W_2 E, the places and versions of its factors, and a product by which other numbers in them are noticed."""

    places: list[tuple[int, int]]
    product: Float[Tensor, "d d"]
    probe: Float[Tensor, " d"]


class MlpHead(LinearHead):
    """r̂_a(·|x) = ⟨h, w_a⟩ + W_1 GELU(W_2 E W_aᵀ h). All attributes share W_1 and W_2."""

    def __init__(self, hidden_size: int, num_attributes: int, vocab_size: int):
        super().__init__(hidden_size, num_attributes, vocab_size)
        self.token_weight = nn.Parameter(torch.empty(vocab_size, hidden_size))  # (v, d): W_1
        self.mixing_weight = nn.Parameter(torch.empty(hidden_size, vocab_size))  # (d, v): W_2
        self._mixing: _Mixing | None = None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.mixing_weight, std=self.mixing_weight.shape[1] ** -0.5)  # so W_2 E is as large as E

    def mixing(self, embedding: Float[Tensor, "v d"]) -> Float[Tensor, "d d"]:
        """W_2 E. It costs |V| d² operations, so outside training it is computed once and kept until weights change."""
        if torch.is_grad_enabled():
            return self.mixing_weight @ embedding.to(self.mixing_weight.dtype)
        places = self._places(embedding)
        if self._mixing is None or self._mixing.places != places:
            product = self.mixing_weight @ embedding.to(self.mixing_weight.dtype)
            self._mixing = _Mixing(places, product, self._probe(embedding))
        return self._mixing.product

    @torch.no_grad()
    def notice_changes(self, embedding: Float[Tensor, "v d"]) -> None:
        """Compute the product anew where its factors were changed behind the back of torch, as by `weight.data`.

        Captured steps read the product, so it stays where it is.
        """
        if self._mixing is None:
            return
        if self._mixing.places != self._places(embedding) or self._mixing.product.is_inference():
            self._mixing = None
        elif not torch.equal(probe := self._probe(embedding), self._mixing.probe):
            self._mixing.product.copy_(self.mixing_weight @ embedding.to(self.mixing_weight.dtype))
            self._mixing.probe = probe

    def _places(self, embedding: Float[Tensor, "v d"]) -> list[tuple[int, int]]:
        return [state_of(self.mixing_weight), state_of(embedding)]

    def _probe(self, embedding: Float[Tensor, "v d"]) -> Float[Tensor, " d"]:
        """The product with one vector, which every number of both factors changes; it takes milliseconds."""
        dtype = self.mixing_weight.dtype
        vector = torch.arange(1.0, 1 + embedding.shape[1], device=embedding.device).sin()
        return self.mixing_weight @ (embedding.to(dtype) @ vector.to(dtype))

    def features(self, hidden: Float[Tensor, "*p d"], embedding: Float[Tensor, "v d"]) -> Float[Tensor, "*p a d"]:
        return F.gelu(F.linear(super().features(hidden, embedding), self.mixing(embedding)))

    def table(self, embedding: Float[Tensor, "v d"]) -> Float[Tensor, "v d"]:
        return self.token_weight


def score_tokens(
    features: Float[Tensor, "*p a d"], table: Float[Tensor, "v d"], tokens: Int[Tensor, "*p"]
) -> Float[Tensor, "*p a"]:
    """Marginal rewards of one token per position."""
    return torch.einsum("...ad,...d->...a", features, F.embedding(tokens, table).to(features.dtype))


def score_candidates(
    features: Float[Tensor, "b a d"], table: Float[Tensor, "v d"], candidates: Candidates | None
) -> Float[Tensor, "b k a"]:
    """Marginal rewards of k candidates per row; None means the whole vocabulary, in order."""
    if candidates is not None and candidates.numel() < len(table):
        rows = F.embedding(candidates, table).to(features.dtype)  # (b, k, d)
        return torch.einsum("bkd,bad->bka", rows, features)
    # One product reads the table once, which is faster than gathering as many rows as it has.
    # (v, d) @ (d, b·a) is 1.7 times as fast as its transpose on CPUs.
    # The fast kernels of GPUs want rows of results that begin at multiples of 16 bytes.
    b, a, d = features.shape
    vectors = F.pad(features.reshape(b * a, d), (0, 0, 0, -(b * a) % 8 if features.is_cuda else 0))
    rewards = (table.to(features.dtype) @ vectors.T)[:, : b * a].view(-1, b, a).transpose(0, 1)  # (b, v, a)
    if candidates is None:
        return rewards
    return rewards.gather(1, candidates[..., None].expand(-1, -1, a))


def check_head(name: str) -> None:
    if name not in HEADS:
        raise OptionError(f"head must be one of {', '.join(HEADS)}, got {name!r}.", "choose one of these.")


def build_head(name: str, hidden_size: int, num_attributes: int, vocab_size: int) -> LinearHead:
    """Make the head of a RAD-Q, with initial weights, by its name in `HEADS`."""
    check_head(name)
    head = HEADS[name](hidden_size, num_attributes, vocab_size)
    head.reset_parameters()
    return head


HEADS: dict[str, type[LinearHead]] = {"linear": LinearHead, "linear-nobaseline": LinearNoBaselineHead, "mlp": MlpHead}
