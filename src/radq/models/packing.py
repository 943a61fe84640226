"""Token ids of texts with padding moved to one side, and without tokens that a model does not know or need.

Axes: b batch, t time, n columns that are left, a anything.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


def leading(input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"], token: int) -> Bool[Tensor, "b t"]:
    """Marks the first real token of each row where it is `token`, such as the BOS that some tokenizers add."""
    return (attention_mask.cumsum(1) == 1) & (attention_mask == 1) & (input_ids == token)


def leave_out_unknown(
    input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"] | None, num_known: int
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Turn tokens with ids of `num_known` or more into padding."""
    known = input_ids < num_known
    return input_ids * known, known.long() if attention_mask is None else attention_mask.long() * known


def pack_right(
    input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"]
) -> tuple[Int[Tensor, "b n"], Int[Tensor, "b n"]]:
    """Move the real tokens of every row to its right end, with no more padding on the left than the longest needs."""
    longest = int(attention_mask.sum(1).max())
    order = attention_mask.argsort(dim=1, stable=True)[:, attention_mask.shape[1] - longest :]
    return input_ids.gather(1, order), attention_mask.gather(1, order)


@dataclass(frozen=True)
class LeftPacked:
    """Texts with their real tokens first: causal attention then needs neither mask nor positions."""

    input_ids: Int[Tensor, "b t"]
    order: Int[Tensor, "b t"]  # where each token came from

    def pack(self, values: Int[Tensor, "b t"]) -> Int[Tensor, "b t"]:
        return values.gather(1, self.order)

    def unpack(self, values: Float[Tensor, "b t a"]) -> Float[Tensor, "b t a"]:
        """Move values that were computed in packed order back to the places of their tokens."""
        return values.gather(1, self.order.argsort(dim=1)[..., None].expand_as(values))


def pack_left(input_ids: Int[Tensor, "b t"], attention_mask: Int[Tensor, "b t"]) -> LeftPacked:
    order = (1 - attention_mask).argsort(dim=1, stable=True)
    return LeftPacked(input_ids.gather(1, order), order)
