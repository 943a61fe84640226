"""LoRA: small trained matrices beside the linear layers of a frozen backbone. What is saved is these, and the head."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from radq.errors import ModelError


def add_adapters(backbone: nn.Module, rank: int) -> None:
    """Freeze a backbone and put adapters beside all of its linear layers."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ModelError("LoRA needs the package peft.", "pip install 'radq[train]'.") from error
    linear = {
        name: type(m).__name__ for name, m in backbone.named_modules() if type(m).__name__ in ("Linear", "Conv1D")
    }
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=sorted({name.split(".")[-1] for name in linear}),
        fan_in_fan_out="Conv1D" in linear.values(),  # GPT-2's transposed layers
    )
    backbone.requires_grad_(False)
    inject_adapter_in_model(config, backbone)


def fold_adapters(backbone: nn.Module) -> None:
    """Add adapters to the weights they stand beside: the same numbers, to rounding, for a third of the kernels."""
    for module in backbone.modules():
        if hasattr(module, "lora_A") and not module.merged:
            module.merge()  # pyright: ignore[reportCallIssue]


def unfold_adapters(backbone: nn.Module) -> None:
    for module in backbone.modules():
        if hasattr(module, "lora_A") and module.merged:
            module.unmerge()  # pyright: ignore[reportCallIssue]


def without_backbone(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of adapters and head."""
    return {name: value for name, value in weights.items() if name.startswith("head.") or ".lora_" in name}


def load_adapters(model: nn.Module, file: Path) -> None:
    weights = load_file(file)
    missing = [name for name in without_backbone(model.state_dict()) if name not in weights]
    if missing:
        raise ModelError(f"the adapters in {str(file)!r} lack {missing[0]!r}.", "is the file complete?")
    model.load_state_dict(weights, strict=False)
