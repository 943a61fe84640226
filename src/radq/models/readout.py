"""Readouts, which read hidden states of a frozen base model for a reward model that has no transformer of its own.

    states of a few layers → each normalised → side by side → a small MLP → the hidden state of the reward model's head

Where the base model is the one that is steered, its own forward gives these states, so that rewards of a RAD-Q cost
next to nothing; a RAD-V runs the base model over its candidates. A folder holds the readout and the head alone, and a
sketch of the base model's weights: beside other weights, the states would mean something else.

Axes: n layers, d hidden size of the base model.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from radq.errors import ModelError, OptionError
from radq.models.kv_cache import take_states
from radq.models.loading import hidden_size
from radq.numerics import Texts, state_of

NUM_LAYERS = 5  # that are read by default
SAMPLES = 8  # numbers of each tensor in a sketch
DIGITS = {torch.bfloat16: 8, torch.float16: 11}  # binary ones of a number
SMALLEST = 2.0**-25  # float16 may round by as much, however small a number is
CLOSE = 1e-5  # relative: what another machine may change in a weight that it converts
FEW = 1e-3  # share of numbers that such a change may tip to the next number of a half precision
TOLERANCE = 0.01  # relative, for these; bfloat16 rounds by at most 0.004


def choose_readout(
    depth: int, hidden_size: int, num_layers: int | None = None, width: int | None = None
) -> dict[str, Any]:
    """Choose evenly spaced layers up to the last one, and an MLP as wide as the base model's states."""
    count = min(NUM_LAYERS, depth) if num_layers is None else num_layers
    if not 1 <= count <= depth:
        raise OptionError(
            f"readout_layers must be from 1 to {depth}, the layers of the base model, got {count}.", "lower it."
        )
    return {"layers": [round(depth * (n + 1) / count) for n in range(count)], "width": width or hidden_size}


class Readout(nn.Module):
    """Turns the states of a base model into the hidden state that a head reads."""

    sketch: Tensor

    def __init__(self, backbone: nn.Module, shape: Any, layers: Sequence[int], width: int):
        """Make a readout of a base model with this configuration, from layers and width as `choose_readout` gives."""
        super().__init__()
        size = shape.hidden_size
        if hidden_size(shape) != size:
            raise OptionError("the layers of this base model have outputs of different sizes.", "leave --reads out.")
        self.layers = tuple(layers)
        self.inner = nn.Linear(len(self.layers) * size, width)
        self.outer = nn.Linear(width, size)
        # the hidden state before the first token of a text, from which RAD-Q scores this token
        self.empty = nn.Parameter(torch.zeros(size))
        self.register_buffer("sketch", torch.zeros(len(list(backbone.parameters())), SAMPLES))
        self._checked: tuple[tuple[int, int], ...] = ()  # the tensors of the base model, when it was last found right

    def require_base(self, backbone: nn.Module) -> None:
        """Refuse to read a base model that has changed since the last call: it may be trained or get adapters later."""
        if any(hasattr(weight, "full_tensor") for weight in backbone.parameters()):
            return  # parts of weights, which FSDP has split among processes
        found = tuple(map(state_of, backbone.parameters()))
        if found != self._checked:
            check_base(self.sketch, backbone)
            self._checked = found

    def reset_parameters(self) -> None:
        """Draw initial weights, with which rewards are small at first."""
        nn.init.normal_(self.inner.weight, std=self.inner.in_features**-0.5)
        nn.init.normal_(self.outer.weight, std=0.1 * self.outer.in_features**-0.5)
        for values in (self.inner.bias, self.outer.bias, self.empty):
            nn.init.zeros_(values)

    def forward(self, states: Float[Tensor, "*p nd"]) -> Float[Tensor, "*p d"]:
        parts = states.to(self.inner.weight.dtype).unflatten(-1, (len(self.layers), -1))
        normalised = F.rms_norm(parts, parts.shape[-1:], eps=1e-6)
        return self.outer(F.gelu(self.inner(normalised.flatten(-2))))

    @torch.no_grad()
    def read_base(self, backbone: nn.Module, input_ids: Texts) -> Float[Tensor, "b t nd"]:
        """Compute the base model's states at each token of texts that begin in the first column."""
        output = backbone(input_ids=input_ids, use_cache=False, output_hidden_states=True)
        return take_states(output, self.layers)


# --- the base model of a readout ---


def sketch_weights(backbone: nn.Module) -> Float[Tensor, "m s"]:
    """Take some numbers of every weight of a base model, by the order of names. The data type hardly changes them."""
    rows = []
    for _, weight in sorted(backbone.named_parameters()):
        flat = weight.detach().flatten()
        places = torch.arange(SAMPLES, device=flat.device) * (len(flat) - 1) // (SAMPLES - 1)
        rows.append(flat[places].float())
    return torch.stack([row.to(rows[0].device) for row in rows]).cpu()  # the device is waited for once


def check_base(sketch: Float[Tensor, "m s"], backbone: nn.Module, name: str = "this language model") -> None:
    """Refuse a base model with other weights than the one whose states the readout was trained on."""
    problem = None
    if any(part.endswith("base_layer") or "lora_" in part for part, _ in backbone.named_modules()):
        problem = f"{name} has adapters"
    elif any(not weight.is_floating_point() for weight in backbone.parameters()):
        problem = f"{name} is quantised"
    elif not _agree(sketch, sketch_weights(backbone)):
        problem = f"{name} has other weights"
    if problem:
        raise ModelError(
            f"the reward model reads the hidden states of the base model it was trained on, and {problem}.",
            "steer that base model, or train a readout for this one: radq train --reads base --backbone NAME.",
        )


def _agree(stored: Tensor, current: Tensor) -> bool:
    """Tell whether two sketches are of the same weights, each perhaps rounded to a smaller data type."""
    if stored.shape != current.shape:
        return False
    stored = stored.float().cpu()
    types = [_smallest_type(numbers) for numbers in (stored, current)]
    slack = _rounding(stored, types[0]) + _rounding(current, types[1]) if types[0] != types[1] else torch.zeros(())
    apart = (stored - current).abs()
    few_apart = (apart > slack + CLOSE * stored.abs()).float().mean() <= FEW
    return bool(few_apart and (apart <= TOLERANCE * stored.abs() + slack).all())


def _smallest_type(numbers: Tensor) -> torch.dtype:
    """The smallest data type that holds all numbers as they are."""
    return next((dtype for dtype in DIGITS if torch.equal(numbers.to(dtype).float(), numbers)), torch.float32)


def _rounding(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """How far rounded numbers may be from what they were before."""
    if dtype not in DIGITS:
        return torch.zeros(())
    _, exponents = torch.frexp(numbers)
    halves = torch.exp2((exponents - DIGITS[dtype] - 1).float())  # of the last digit
    return torch.where(numbers == 0, SMALLEST, halves.clamp_min(SMALLEST))


def join_layers(layers: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """List all layers that several readouts read, each once."""
    return tuple(sorted({layer for some in layers for layer in some}))


def pick_layers(states: Float[Tensor, "*p n"], joined: Sequence[int], layers: Sequence[int]) -> Float[Tensor, "*p m"]:
    """Pick the outputs of some layers from those of joined ones, side by side."""
    if tuple(layers) == tuple(joined):
        return states
    parts = states.chunk(len(joined), dim=-1)
    return torch.cat([parts[joined.index(layer)] for layer in layers], dim=-1)
