"""RAD-V fits a reward matrix of full rank, RAD-Q of a smaller hidden size cannot (appendix D of the paper).

    python recipes/expressivity.py --kind v --device cuda
    python recipes/expressivity.py --kind q --device cuda

The data are pairs of a first name i and a last name j ≤ i out of n: 1 for i = j, 0 for j < i, unknown for j > i. Every
completion of that matrix is triangular with ones on the diagonal, so it has rank n. The backbone is a GPT-2 with random
weights and hidden size d < n. Prints the mean squared error over all n(n + 1) / 2 entries as training goes on.
"""

import math
import tempfile
import time
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from transformers import AutoModelForCausalLM, GPT2Config

from radq import RadQ, RadV, RewardModel
from radq.sources.hub import quiet
from radq.training.losses import squared_loss


@dataclass
class Arguments:
    kind: Literal["v", "q"] = "v"
    """Kind of reward model: v for RAD-V, q for RAD-Q."""
    n: int = 1024
    """Number n of first and of last names, which is the rank of the matrix."""
    hidden: int = 512
    """Hidden size d of the backbone."""
    layers: int = 3
    """Number of layers of the backbone."""
    steps: int = 10_000
    """Largest number of optimizer steps."""
    batch_size: int = 4096
    """Pairs per step, a quarter of them from the diagonal, which is a 512th of the entries."""
    learning_rate: float = 3e-4
    """Peak learning rate: it rises for 200 steps, then falls to 0."""
    target: float = 5e-6
    """Mean squared error below which training stops."""
    device: str = "cpu"
    """Device to train on: cpu or cuda."""
    seed: int = 0
    """Seed of weights and batches."""


def make_model(arguments: Arguments) -> RewardModel:
    """A reward model with random weights. Token 0 is the BOS, 1 to n are first names, n + 1 to 2n last names."""
    config = GPT2Config(
        vocab_size=1 + 2 * arguments.n,
        n_embd=arguments.hidden,
        n_layer=arguments.layers,
        n_head=max(1, arguments.hidden // 128),
        n_positions=4,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with tempfile.TemporaryDirectory() as folder, quiet():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        kind = RadV if arguments.kind == "v" else RadQ
        model = kind.from_backbone(folder, attributes=["allowed"])
    model.backbone.set_attn_implementation("eager")  # three tokens fill little of a fused kernel's tile
    return model.to(arguments.device)


def rewards_of(model: RewardModel, first: torch.Tensor, last: torch.Tensor, n: int) -> torch.Tensor:
    """Rewards r̂(last name | first name) of b pairs, shape (b, 1, 1)."""
    return model(torch.stack([1 + first, 1 + n + last], dim=1)).rewards[:, 1:]


@torch.no_grad()
def matrix_error(model: RewardModel, first: torch.Tensor, last: torch.Tensor, n: int) -> float:
    """Mean squared error over all known entries."""
    squares = 0.0
    for i, j in zip(first.split(2**15), last.split(2**15), strict=True):
        squares += float((rewards_of(model, i, j, n)[:, 0, 0] - (i == j).float()).square().sum())
    return squares / len(first)


def main(arguments: Arguments) -> None:
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    n, quarter = arguments.n, arguments.batch_size // 4
    model = make_model(arguments)
    first, last = torch.tril_indices(n, n, device=arguments.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=arguments.learning_rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * step / arguments.steps))
    )
    began, error = time.perf_counter(), float("inf")
    for step in range(1, arguments.steps + 1):
        pick = torch.randint(len(first), (3 * quarter,), device=arguments.device)
        diagonal = torch.randint(n, (quarter,), device=arguments.device)
        i, j = torch.cat([first[pick], diagonal]), torch.cat([last[pick], diagonal])
        rewards = rewards_of(model, i, j, n)
        squared_loss(rewards, torch.ones_like(rewards[..., 0]), (i == j).float()[:, None]).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 500 == 0 or step == arguments.steps:
            error = matrix_error(model, first, last, n)
            print(
                f"RAD-{arguments.kind.upper()} step {step}: MSE {error:.3g}, {time.perf_counter() - began:.0f} s",
                flush=True,
            )
            if error < arguments.target:
                break
    print(f"RAD-{arguments.kind.upper()}, n = {n}, d = {arguments.hidden}: MSE {error:.3g} over {len(first)} entries")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
