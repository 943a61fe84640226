"""LoRA: small trained matrices beside the linear layers of a frozen backbone. What is saved is these, and the head.

An adapted layer is one product with W + s·B·A, which costs as much as the layer alone: the sum has the size of the
weights, not of the batch. Gradients of A and B are products of rank r, so training needs no pass over the activations
beside those of the backbone. Names and scale are those of peft's files.
"""

from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from radq.errors import ModelError

SCALE = 2.0  # s, as with lora_alpha = 2 · rank


@final
class AdaptedLinear(nn.Module):
    """A frozen linear layer, or one of GPT-2's transposed ones, and its adapter."""

    def __init__(self, layer: nn.Linear | Conv1D, rank: int):
        super().__init__()
        self.base_layer = layer
        self.transposed = isinstance(layer, Conv1D)
        out, into = self.weight.shape
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)  # also beside weights of half precision
        options: dict[str, Any] = {"device": layer.weight.device, "dtype": dtype, "bias": False}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(into, rank, **options)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, out, **options)})
        nn.init.zeros_(self.b)
        self.folded = False

    @property
    def weight(self) -> Float[Tensor, "o i"]:
        return self.base_layer.weight.T if self.transposed else self.base_layer.weight

    @property
    def a(self) -> Any:  # (r, i)
        return self.lora_A["default"].weight

    @property
    def b(self) -> Any:  # (o, r)
        return self.lora_B["default"].weight

    def forward(self, x: Float[Tensor, "*p i"]) -> Float[Tensor, "*p o"]:
        if self.folded:
            return self.base_layer(x)
        kind = x.device.type
        x = x.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype)
        y: Any = _AdaptedProduct.apply(x, self.weight, self.a, self.b)
        bias = self.base_layer.bias
        return y if bias is None else y + bias.to(y.dtype)

    @torch.no_grad()
    def fold(self) -> None:
        self.weight.copy_(_sum(self.weight, self.a, self.b))
        self.folded = True

    @torch.no_grad()
    def unfold(self) -> None:
        self.weight.copy_(_sum(self.weight, self.a, -self.b))
        self.folded = False


@final
class _AdaptedProduct(torch.autograd.Function):
    """x (W + s·B·A)ᵀ with gradients of x, A and B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        return F.linear(x, _sum(weight, a, b).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        dy = grads[0].to(x.dtype)
        dx = dy @ _sum(weight, a, b).to(x.dtype) if ctx.needs_input_grad[0] else None
        rows, d_rows = x.flatten(0, -2), dy.flatten(0, -2)
        da = (d_rows @ b.to(x.dtype)).T @ rows  # (r, i)
        db = d_rows.T @ (rows @ a.T.to(x.dtype))  # (o, r)
        return dx, None, SCALE * da.to(a.dtype), SCALE * db.to(b.dtype)


def _sum(weight: Float[Tensor, "o i"], a: Float[Tensor, "r i"], b: Float[Tensor, "o r"]) -> Float[Tensor, "o i"]:
    """W + s·B·A, in the precision of the adapter whatever those of the weights and the forward are."""
    with torch.autocast(weight.device.type, enabled=False):
        return torch.addmm(weight.to(a.dtype), b, a, alpha=SCALE)


def add_adapters(backbone: nn.Module, rank: int) -> None:
    """Freeze a backbone and put adapters beside all of its linear layers."""
    backbone.requires_grad_(False)
    for name, layer in list(backbone.named_modules()):
        if isinstance(layer, nn.Linear | Conv1D):
            parent, _, last = name.rpartition(".")
            setattr(backbone.get_submodule(parent), last, AdaptedLinear(layer, rank))


def fold_adapters(backbone: nn.Module) -> None:
    """Add adapters to the weights they stand beside: the same numbers, to rounding, and no sum at every step."""
    for module in backbone.modules():
        if isinstance(module, AdaptedLinear) and not module.folded:
            module.fold()


def unfold_adapters(backbone: nn.Module) -> None:
    for module in backbone.modules():
        if isinstance(module, AdaptedLinear) and module.folded:
            module.unfold()


def without_backbone(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of adapters and head."""
    return {name: value for name, value in weights.items() if name.startswith("head.") or ".lora_" in name}


def load_adapters(model: nn.Module, file: Path) -> None:
    weights = load_file(file)
    missing = [name for name in without_backbone(model.state_dict()) if name not in weights]
    if missing:
        raise ModelError(f"the adapters in {str(file)!r} lack {missing[0]!r}.", "is the file complete?")
    model.load_state_dict(weights, strict=False)
