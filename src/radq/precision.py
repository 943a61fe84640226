"""Numbers of models in half precision, where sums and small differences of them are taken."""

import torch
from jaxtyping import Float
from torch import Tensor


def precise(values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """In float32 or better."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
