"""What a training step of RAD-Q costs, against a head that multiplies by the whole vocabulary and gathers.

    python benchmarks/training.py [--device cuda] [--batch 100 --length 128 --attributes 7] [--json]

A random reward model of GPT-2-small's shape; a step is forward, loss with regulariser, backward and AdamW. On a GPU
forwards run in bfloat16 (autocast) and memory is the peak of the allocator; on a CPU memory is not measured.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from radq import RadQ
from radq.models.loading import quiet
from radq.training.losses import baseline_loss, squared_loss

Batch = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--attributes", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, quiet():
        GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
        model = RadQ.from_backbone(folder, [f"attribute_{a}" for a in range(arguments.attributes)])
    nn.Module.to(model, arguments.device).train()
    shape = (arguments.batch, arguments.length)
    batch = {
        "input_ids": torch.randint(50257, shape),
        "random_tokens": torch.randint(50257, shape),
        "mask": torch.ones(shape, dtype=torch.long),
        "labels": torch.rand(arguments.batch, arguments.attributes),
    }
    batch = {name: values.to(arguments.device) for name, values in batch.items()}
    results = {
        "only the tokens needed": measure(model, own_outputs, batch, arguments.rounds),
        "whole vocabulary": measure(model, whole_vocabulary_outputs, batch, arguments.rounds),
    }
    own, whole = results.values()
    report = {
        "machine": torch.cuda.get_device_name()
        if arguments.device != "cpu"
        else f"CPU, {torch.get_num_threads()} threads",
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
    output = model(batch["input_ids"], batch["mask"], batch["random_tokens"])
    return output.rewards, output.marginals


def whole_vocabulary_outputs(model: RadQ, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same numbers by way of a tensor over positions, attributes and vocabulary."""
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
    cuda = batch["mask"].device.type == "cuda"
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=cuda)
    seconds = []
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for round_ in range(rounds + 2):
        begin = time.perf_counter()
        with torch.autocast(batch["mask"].device.type, torch.bfloat16, enabled=cuda):
            rewards, marginals = outputs(model, batch)
        loss = squared_loss(rewards, batch["mask"], batch["labels"]) + baseline_loss(marginals, batch["mask"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        if round_ >= 2:  # the first two warm up
            seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    return {"tokens_per_second": batch["mask"].numel() / median(seconds), "peak_gib": round(peak, 3)}


if __name__ == "__main__":
    main()
