"""Speed and memory of a training step of RAD-Q, compared with a head that scores the whole vocabulary.

    python benchmarks/head.py [--device cuda] [--batch 100 --length 128 --attributes 7] [--json]

The model is a random reward model with the shape of GPT-2-small. A step is forward, loss with regulariser, backward and
AdamW. RAD-Q scores only the tokens it needs; the other head scores all tokens and then picks those. On a GPU, forwards
run in bfloat16 (autocast) and memory is the peak of the allocator; on a CPU, memory is not measured.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import tyro
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from radq import RadQ
from radq.benchmark.measure import describe_machine, read_clock
from radq.sources.hub import quiet
from radq.training.losses import baseline_loss, squared_loss

Batch = dict[str, Tensor]


@dataclass
class Arguments:
    device: str = "cpu"
    """cpu, cuda or cuda:1, …"""
    batch: int = 100
    """Texts per step."""
    length: int = 128
    """Tokens per text."""
    attributes: int = 7
    """Attributes of the reward model."""
    rounds: int = 10
    """Measured steps, after two that warm up."""
    json: bool = False
    """Print JSON."""


def main(arguments: Arguments) -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, quiet():
        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
        model = RadQ.from_backbone(folder, [f"attribute_{a}" for a in range(arguments.attributes)])
    nn.Module.to(model, arguments.device).train()
    shape = (arguments.batch, arguments.length)
    batch = {
        "input_ids": torch.randint(50257, shape),
        "random_tokens": torch.randint(50257, shape),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "labels": torch.rand(arguments.batch, arguments.attributes),
    }
    batch = {name: values.to(arguments.device) for name, values in batch.items()}
    results = {
        "only the tokens needed": measure(model, own_outputs, batch, arguments.rounds),
        "whole vocabulary": measure(model, whole_vocabulary_outputs, batch, arguments.rounds),
    }
    own, whole = results.values()
    report = {
        "machine": describe_machine(arguments.device),
        "torch": torch.__version__,
        "batch": list(shape),
        "attributes": arguments.attributes,
        "results": results,
        "speed_ratio": round(own["tokens_per_second"] / whole["tokens_per_second"], 2),
        "memory_ratio": round(whole["peak_gib"] / own["peak_gib"], 2) if own["peak_gib"] else None,
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{report['machine']}, torch {report['torch']}; {shape[0]} × {shape[1]} tokens")
    for name, result in results.items():
        print(f"  {name:<24} {result['tokens_per_second']:>10.0f} tokens/s {result['peak_gib']:>8.2f} GiB")
    print(f"faster: {report['speed_ratio']}×, smaller: {report['memory_ratio']}×")


def own_outputs(model: RadQ, batch: Batch) -> tuple[Tensor, Tensor]:
    """Rewards of the tokens and of random ones, as RAD-Q computes them in training."""
    output = model(batch["input_ids"], batch["attention_mask"], batch["random_tokens"])
    return output.rewards, output.marginals


def whole_vocabulary_outputs(model: RadQ, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same rewards, picked from a tensor over positions, attributes and the whole vocabulary."""
    ids = batch["input_ids"]
    bos = torch.full_like(ids[:, :1], model.config.bos_token_id)
    hidden = model.backbone(input_ids=torch.cat([bos, ids], dim=1)[:, :-1], use_cache=False).last_hidden_state
    whole = model.head.features(hidden, model.embedding) @ model.embedding.T  # (b, t, a, v)

    def gather(tokens: Tensor) -> Tensor:
        return whole.gather(3, tokens[..., None, None].expand(-1, -1, whole.shape[2], 1)).squeeze(3)

    return gather(ids) + model.head.baseline(hidden), gather(batch["random_tokens"])


def measure(
    model: RadQ, outputs: Callable[[RadQ, Batch], tuple[Tensor, Tensor]], batch: Batch, rounds: int
) -> dict[str, float]:
    """Median speed and peak memory of training steps."""
    device = batch["attention_mask"].device
    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=cuda)
    seconds = []
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for round_ in range(rounds + 2):
        begin = read_clock(str(device))
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            rewards, marginals = outputs(model, batch)
        loss = squared_loss(rewards, batch["attention_mask"], batch["labels"]) + baseline_loss(
            marginals, batch["attention_mask"]
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if round_ >= 2:  # the first two warm up
            seconds.append(read_clock(str(device)) - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return {"tokens_per_second": batch["attention_mask"].numel() / median(seconds), "peak_gib": round(peak, 3)}


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
