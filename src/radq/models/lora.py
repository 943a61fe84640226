"""LoRA: small trained matrices A and B beside the linear layers of a frozen backbone.

An adapted layer multiplies its input by W + s·B·A. This sum has the size of the weights, not of the batch, so computing
it costs little, and the layer is about as fast as without an adapter. The gradients of A and B are products of rank r,
so training needs no further pass over the activations.

Only the adapters and the head of the reward model are saved. The files have the format of PEFT: adapter_config.json,
and adapter_model.safetensors with PEFT's names for the tensors. So PEFT can load the adapters into
`AutoModel.from_pretrained(BACKBONE)`. The tensors of the head are in the same file.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from radq.errors import ModelError
from radq.models.config import RewardModelConfig
from radq.models.loading import find_backbone
from radq.models.readout import check_base
from radq.numerics import state_of
from radq.sources.embedded import EMBEDDED, HUB_NAME
from radq.sources.model_source import ModelName, ModelSource, Origin
from radq.sources.peft_adapter import CONFIG_FILE, WEIGHT_FILE

SCALE = 2.0  # s in W + s·B·A, as with lora_alpha = 2 · rank
READOUT_FILE = "model.safetensors"  # also of adapters, in folders that earlier versions have written


@final
class AdaptedLinear(nn.Module):
    """A frozen linear layer (or a transposed one, as in GPT-2) with its adapter."""

    def __init__(self, layer: nn.Linear | Conv1D, rank: int):
        super().__init__()
        self.base_layer = layer
        self.transposed = isinstance(layer, Conv1D)
        out, into = self.weight.shape
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)  # adapters of half-precision weights are float32
        options: dict[str, Any] = {"device": layer.weight.device, "dtype": dtype, "bias": False}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(into, rank, **options)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, out, **options)})
        nn.init.zeros_(self.b)
        self._frozen: Tensor | None = None  # the weights before folding
        self.folds_again = False  # after weights are loaded
        self._folded_with: tuple[tuple[int, int], ...] = ()  # places and versions of the weights that were folded
        self.register_state_dict_post_hook(_store_frozen)
        self.register_load_state_dict_pre_hook(_unfold_before_loading)
        self.register_load_state_dict_post_hook(_fold_after_loading)

    @property
    def folded(self) -> bool:
        return self._frozen is not None

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
        """Add the adapter, as it is now, to the weights of the layer; keep the frozen weights in main memory."""
        adapter = (state_of(self.a), state_of(self.b))
        if self.folded and self._folded_with == adapter:
            return
        self.unfold()
        self._frozen = self.weight.to("cpu", copy=True)
        self.weight.copy_(_adapted_weight(self.weight, self.a, self.b))
        self._folded_with = adapter

    @torch.no_grad()
    def unfold(self) -> None:
        """Restore the frozen weights bit for bit; subtracting the adapter again would leave rounding errors in them."""
        if self._frozen is not None:
            self.weight.copy_(self._frozen)
            self._frozen = None

    @torch.no_grad()
    def merged(self) -> Tensor:
        """A copy of the weights with the adapter added, as the layer would store them."""
        weight = self.weight if self.folded else _adapted_weight(self.weight, self.a, self.b).to(self.weight.dtype)
        return (weight.T if self.transposed else weight).contiguous().clone()


# Hooks of torch, with its arguments. They make folding invisible in stored weights, and loading effective.


def _store_frozen(layer: Any, stored: dict[str, Any], prefix: str, *_: Any) -> None:
    if layer.folded:
        frozen = layer._frozen.T if layer.transposed else layer._frozen
        stored[f"{prefix}base_layer.weight"] = frozen.to(layer.weight.device, layer.weight.dtype).contiguous()


def _unfold_before_loading(layer: Any, *_: Any) -> None:
    layer.folds_again = layer.folded
    layer.unfold()


def _fold_after_loading(layer: Any, *_: Any) -> None:
    if layer.folds_again:
        layer.base_layer.weight.data = layer.base_layer.weight.data.clone()  # it may be the caller's, with assign=True
        layer.fold()
    layer.folds_again = False


@final
class _AdaptedProduct(torch.autograd.Function):
    """The product x (W + s·B·A)ᵀ with gradients of x, A and B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        return F.linear(x, _adapted_weight(weight, a, b).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        dy = grads[0].to(x.dtype)
        dx = dy @ _adapted_weight(weight, a, b).to(x.dtype) if ctx.needs_input_grad[0] else None
        rows, d_rows = x.flatten(0, -2), dy.flatten(0, -2)
        da = (d_rows @ b.to(x.dtype)).T @ rows  # (r, i)
        db = d_rows.T @ (rows @ a.T.to(x.dtype))  # (o, r)
        return dx, None, SCALE * da.to(a.dtype), SCALE * db.to(b.dtype)


def _adapted_weight(
    weight: Float[Tensor, "o i"], a: Float[Tensor, "r i"], b: Float[Tensor, "o r"]
) -> Float[Tensor, "o i"]:
    """Compute W + s·B·A in the dtype of the adapter, also if the weights or the forward have another one."""
    with torch.autocast(weight.device.type, enabled=False):
        return torch.addmm(weight.to(a.dtype), b, a, alpha=SCALE)


def add_adapters(backbone: nn.Module, rank: int) -> None:
    """Freeze a backbone and replace all of its linear layers by adapted ones, in place."""
    backbone.requires_grad_(False)
    for name, layer in list(backbone.named_modules()):
        if isinstance(layer, nn.Linear | Conv1D):
            parent, _, last = name.rpartition(".")
            setattr(backbone.get_submodule(parent), last, AdaptedLinear(layer, rank))


def adapted_layers(backbone: nn.Module) -> dict[str, AdaptedLinear]:
    return {name: layer for name, layer in backbone.named_modules() if isinstance(layer, AdaptedLinear)}


def fold_adapters(backbone: nn.Module, only_again: bool = False) -> None:
    """Add all adapters to their weights: results are the same up to rounding, and no step has to compute the sum.

    With `only_again`, those are folded that were before, and have changed since.
    """
    for layer in adapted_layers(backbone).values():
        if layer.folded or not only_again:
            layer.fold()


def unfold_adapters(backbone: nn.Module) -> None:
    """Restore the frozen weights of all layers whose adapters are folded."""
    for layer in adapted_layers(backbone).values():
        layer.unfold()


def merged_weights(backbone: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights of a backbone as it is without adapters, which are added to them."""
    stored = backbone.state_dict().items()
    weights = {name.replace(".base_layer.", "."): value.clone() for name, value in stored if ".lora_" not in name}
    return weights | {f"{name}.weight": layer.merged() for name, layer in adapted_layers(backbone).items()}


# --- files ---


def save_beside_backbone(model: Any, folder: Path, final_folder: Path, weights: dict[str, Tensor]) -> None:
    """Save only what was trained of a reward model with these tensors: adapters or a readout, and the head."""
    config = copy.deepcopy(model.config)
    config.set_origin(config.origin.relative_to(final_folder))
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    config.save_pretrained(folder)
    trained = {_file_name(name): tensor.contiguous() for name, tensor in _without_backbone(weights).items()}
    save_file(trained, folder / (WEIGHT_FILE if config.lora_rank else READOUT_FILE), metadata={"format": "pt"})
    if config.lora_rank:
        adapter = _describe_adapters(model.backbone, config.origin)
        (folder / CONFIG_FILE).write_text(json.dumps(adapter, indent=2) + "\n", encoding="utf-8")


def _describe_adapters(backbone: nn.Module, origin: Origin) -> dict[str, Any]:
    """The adapters of a backbone as PEFT describes them."""
    layers = adapted_layers(backbone)
    rank = len(next(iter(layers.values())).a)
    return {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": HUB_NAME if origin.name == EMBEDDED else origin.name,
        "revision": origin.revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": SCALE * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(layer.transposed for layer in layers.values()),
        "target_modules": list(layers),  # all names: a truncated backbone has fewer layers than its original
    }


def _find_adapters(source: ModelSource) -> Path:
    """Find the file with the adapters of a LoRA model, in a folder or on the hub."""
    for file in (WEIGHT_FILE, READOUT_FILE):
        found = cached_file(source.place, file, _raise_exceptions_for_missing_entries=False, **source.hub)
        if found is not None:
            return Path(found)
    raise ModelError(
        f"{source.place!r} holds neither {WEIGHT_FILE} nor {READOUT_FILE}.", "copy or download the whole folder again."
    )


def load_adapters(model: Any, source: ModelSource) -> None:
    """Load adapters or a readout, and the head, into a reward model of the same shape."""
    with source.explained("a readout" if model.config.readout else "adapters"):
        _load_file(model, _find_adapters(source))


def _load_file(model: nn.Module, file: Path) -> None:
    weights = {_model_name(name): tensor for name, tensor in load_file(file).items()}
    missing = [name for name in _without_backbone(model.state_dict()) if name not in weights]
    if missing:
        what = "readout" if file.name == READOUT_FILE else "adapters"
        raise ModelError(f"the {what} in {str(file)!r} has no {missing[0]!r}.", "copy or download the file again.")
    model.load_state_dict(weights, strict=False)


def load_beside_backbone(
    kind: Any,
    config: RewardModelConfig,
    source: ModelSource,
    given_backbone: ModelName | None,
    dtype: Any = None,
    torch_dtype: Any = None,
    **loading: Any,
) -> Any:
    """Load a reward model of some class with adapters or a readout.

    These and its head come from its folder, and the backbone from the place that its configuration names.
    """
    origin = config.origin if given_backbone is None else replace(config.origin, name=str(given_backbone))
    what = "readout" if config.readout else "LoRA reward model"
    backbone = origin.find(source.folder, what)
    loading = {key: value for key, value in loading.items() if key not in ("revision", "subfolder")}  # of the adapters
    wanted = str(dtype or torch_dtype or "auto").removeprefix("torch.")
    model = kind.from_backbone(
        backbone,
        config.attributes,
        num_layers=config.backbone.num_hidden_layers,
        dtype=torch.float32 if wanted == "auto" else getattr(torch, wanted),
        loading={**loading, **backbone.hub},
        **_options(config),
    )
    if config.lora_rank:
        add_adapters(model.backbone, config.lora_rank)
        model.config.lora_rank = config.lora_rank
    model.config.set_origin(replace(origin, name=backbone.full_name))
    load_adapters(model, source)
    if model.readout is not None:
        model.backbone.requires_grad_(False)
        check_base(model.readout.sketch, model.backbone, repr(backbone.name))
    return model


def load_beside_lm(kind: Any, config: RewardModelConfig, source: ModelSource, lm: Any) -> Any:
    """Load a reward model with a readout, which shares the weights of the language model that is to be steered."""
    with source.explained("a readout"):
        file = _find_adapters(source)
        sketch = load_file(file)["readout.sketch"]
    check_base(sketch, find_backbone(lm, type(lm).__name__))  # first, since other shapes could not be loaded
    model = kind._over_lm(lm, source.find_tokenizer(), "the language model", config.attributes, **_options(config))
    model.config.set_origin(config.origin)
    _load_file(model, file)
    return model


def _options(config: RewardModelConfig) -> dict[str, Any]:
    """Return the settings of a stored model that a new one over the same backbone must have."""
    kept = ("loss", "response_range", "label_scales", "prepend_bos", "head", "readout")
    return {key: getattr(config, key) for key in kept}


def _without_backbone(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keep only the tensors of adapters, readout and head."""
    return {
        name: value for name, value in weights.items() if name.startswith(("head.", "readout.")) or ".lora_" in name
    }


def _file_name(name: str) -> str:
    """Return the name of a tensor in a file: PEFT's name for adapters, its own name for the head."""
    return name.replace("backbone.", "base_model.model.", 1).replace(".default.weight", ".weight")


def _model_name(name: str) -> str:
    """Return the name in the model of a tensor in a file; files of earlier versions already have that name."""
    if not name.startswith("base_model.model."):
        return name
    return name.replace("base_model.model.", "backbone.", 1).replace(".weight", ".default.weight")
