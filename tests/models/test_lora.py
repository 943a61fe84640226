"""Adapted layers give the results of a layer with the weights W + s·B·A."""

import copy
from pathlib import Path

import pytest
import torch
from families import make_reward
from torch import nn
from transformers.pytorch_utils import Conv1D

from radq.guides.reward import RewardGuide
from radq.models.kinds import RadQ, RadV
from radq.models.lora import AdaptedLinear, add_adapters

LAYERS = [nn.Linear(5, 7), nn.Linear(5, 7, bias=False), Conv1D(7, 5)]


def adapted(layer: nn.Linear | Conv1D) -> AdaptedLinear:
    backbone = nn.ModuleDict({"layer": layer}).double()
    add_adapters(backbone, rank=3)
    found = backbone["layer"]
    assert isinstance(found, AdaptedLinear)
    nn.init.normal_(found.b)
    return found


def apart(module: AdaptedLinear, x: torch.Tensor) -> torch.Tensor:
    """The layer plus the adapter, computed separately, with a scale of 2."""
    return module.base_layer(x) + 2 * (x @ module.a.T) @ module.b.T


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_and_adapter_are_one_product(layer: nn.Linear | Conv1D) -> None:
    module, x = adapted(layer), torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(module(x), apart(module, x))
    parameters = (x, module.a, module.b)
    weights = torch.randn(2, 4, 7, dtype=torch.float64)
    expected = torch.autograd.grad((apart(module, x) * weights).sum(), parameters)
    torch.testing.assert_close(torch.autograd.grad((module(x) * weights).sum(), parameters), expected)
    assert not any(parameter.requires_grad for parameter in module.base_layer.parameters())


@pytest.mark.parametrize("layer", LAYERS)
def test_a_folded_layer_computes_the_same(layer: nn.Linear | Conv1D) -> None:
    module, x = adapted(layer), torch.randn(4, 5, dtype=torch.float64)
    expected, weight = module(x), module.weight.clone()
    module.fold()
    assert not torch.allclose(module.weight, weight)
    torch.testing.assert_close(module(x), expected)
    module.unfold()
    torch.testing.assert_close(module.weight, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layer", LAYERS)
def test_frozen_weights_survive_folding_bit_for_bit(layer: nn.Linear | Conv1D, dtype: torch.dtype) -> None:
    module = adapted(layer).to(dtype)
    weight = module.weight.clone()
    for _ in range(5):
        module.fold()
        module.unfold()
    assert torch.equal(module.weight, weight)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("assign", [False, True])
def test_loading_weights_into_a_folded_layer_takes_effect(layer: nn.Linear | Conv1D, assign: bool) -> None:
    module, other = (adapted(copy.deepcopy(layer)) for _ in range(2))
    x = torch.randn(4, 5, dtype=torch.float64)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight))
    expected, stored = other(x), copy.deepcopy(other.state_dict())
    module.fold()
    module.load_state_dict(stored, assign=assign)
    assert module.folded
    torch.testing.assert_close(module(x), expected)
    for name, weight in other.state_dict().items():
        assert torch.equal(stored[name], weight)  # what was given is not folded
        assert torch.equal(module.state_dict()[name], weight)
    module.unfold()
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("layer", LAYERS)
def test_stored_weights_do_not_hold_the_adapter_twice(layer: nn.Linear | Conv1D) -> None:
    module, x = adapted(copy.deepcopy(layer)), torch.randn(4, 5, dtype=torch.float64)
    before, expected = copy.deepcopy(module.state_dict()), module(x)
    module.fold()
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, before[name])
    again = AdaptedLinear(copy.deepcopy(layer).double(), rank=3).double()
    again.load_state_dict(module.state_dict())
    torch.testing.assert_close(again(x), expected)


@torch.no_grad()
def test_an_adapter_that_changes_after_a_guide_was_made_counts(lm_folders: dict[str, Path]) -> None:
    model = make_reward("q", lm_folders["llama"])
    model.add_lora(2, str(lm_folders["llama"]))
    ids, mask = torch.tensor([[5, 9]]), torch.ones(1, 2, dtype=torch.long)
    RewardGuide(model, {"nice": 1.0})
    before = model.next_rewards(ids, mask)
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            weight.add_(0.3)
    after = model.next_rewards(ids, mask)
    assert not torch.allclose(after, before)
    model.train()
    torch.testing.assert_close(model.eval().next_rewards(ids, mask), after)  # not folded


def test_in_autocast_products_are_in_bfloat16_and_gradients_in_float32() -> None:
    module, x = adapted(nn.Linear(5, 7)).float(), torch.randn(4, 5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    expected = torch.autograd.grad(apart(module, x).sum(), (x, module.a, module.b))
    for parameter, gradient in zip((x, module.a, module.b), expected, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, gradient, rtol=0.03, atol=0.1)


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layer", [nn.Linear(5, 7), Conv1D(7, 5)])
def test_adapters_are_float32_beside_weights_of_half_precision(layer: nn.Linear | Conv1D, dtype: torch.dtype) -> None:
    module = AdaptedLinear(copy.deepcopy(layer).to(dtype), rank=3)
    nn.init.normal_(module.b)
    assert module.a.dtype == module.b.dtype == torch.float32
    x = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    y = module(x)
    assert y.dtype == dtype
    wide = AdaptedLinear(copy.deepcopy(module.base_layer).float(), rank=3)
    wide.load_state_dict(module.state_dict())
    torch.testing.assert_close(y.float(), wide(x.float()), rtol=0.03, atol=0.1)
    y.float().square().sum().backward()
    for parameter in (module.a, module.b):
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == dtype
    module.fold()
    assert module.weight.dtype == dtype
    torch.testing.assert_close(module(x).float(), y.float(), rtol=0.03, atol=0.1)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("kind", ["q", "v"])
@pytest.mark.parametrize("head", ["linear", "linear-nobaseline", "mlp"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_model_of_float32_adapters_over_a_half_backbone(
    kind: str, head: str, dtype: torch.dtype, lm_folders: dict[str, Path]
) -> None:
    """Rewards are those of the same weights in float32, in texts and of next tokens."""
    options = {"head": head} if kind == "q" else {}
    torch.manual_seed(0)
    half = {"q": RadQ, "v": RadV}[kind].from_backbone(lm_folders["llama"], ["a", "b"], dtype=dtype, **options)
    assert {buffer.dtype for buffer in half.backbone.buffers() if buffer.is_floating_point()} == {torch.float32}
    half.head.float()
    half.add_lora(2, str(lm_folders["llama"]))
    wide = copy.deepcopy(half).float()
    ids = torch.tensor([[3, 9, 4, 12], [5, 5, 6, 7]])
    rewards = half.token_rewards(ids)
    assert rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, wide.token_rewards(ids), rtol=0.05, atol=0.05)
    torch.testing.assert_close(half.next_rewards(ids), wide.next_rewards(ids), rtol=0.05, atol=0.05)
    candidates = torch.tensor([[3, 4], [5, 6]])
    torch.testing.assert_close(
        half.next_rewards(ids, candidates=candidates),
        wide.next_rewards(ids, candidates=candidates),
        rtol=0.05,
        atol=0.05,
    )
