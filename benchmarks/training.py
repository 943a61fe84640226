"""Speed of `radq train`'s own trainer on short texts, with steps captured as CUDA graphs and without.

    python benchmarks/training.py [--device cuda] [--batch-sizes 32 100] [--json]

The model is a RAD-Q over a random LLaMA with the shape of the first 12 layers of SmolLM2-135M. The texts are random and
as short as the phrases of SST-2: about 10 tokens on average, from 1 to 50. Speeds are tokens per second without
padding, over whole optimizer steps and the making of batches. Both runs begin with the same weights and see the same
batches, so that their losses are compared, too. On a CPU nothing is captured, and the ratio is about 1.
"""

import gc
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from radq import RadQ
from radq.benchmark.measure import describe_machine, read_clock
from radq.data.dataset import RewardData
from radq.data.label_scale import NUMBER, LabelCells, LabelRules
from radq.sources.hub import quiet
from radq.training.config import RewardTrainingConfig
from radq.training.reward_trainer import RewardTrainer

MEAN_LENGTH, LONGEST = 10, 50
FIRST_TOKEN = 3  # smaller ids are special tokens


@dataclass
class Arguments:
    device: str = "cpu"
    """cpu or cuda"""
    batch_sizes: tuple[int, ...] = (32, 100)
    """Texts per step, each of which is measured."""
    steps: int = 300
    """Measured steps."""
    warmup: int = 100
    """Steps before these, in which most shapes are captured."""
    layers: int = 12
    """Layers of the backbone."""
    width: int = 576
    """Width of its hidden states, a multiple of 64."""
    vocabulary: int = 49152
    """Tokens of its vocabulary."""
    precision: str = "auto"
    """auto, float32 or bfloat16"""
    json: bool = False
    """Print JSON."""


class Measured(RewardTrainer):
    """The trainer of `radq train`, which keeps its losses and saves no checkpoints."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.losses: list[Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.losses.append(super().training_step(*args, **kwargs))
        return self.losses[-1]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        pass


class Clock(TrainerCallback):
    """Reads the time and the number of tokens after the steps that warm up, and at the end."""

    def __init__(self, trainer: Measured, warmup: int):
        self.trainer, self.warmup = trainer, warmup
        self.readings: list[tuple[float, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (self.warmup, state.max_steps):
            self.readings.append((read_clock(str(args.device)), self.trainer.tokens_seen))


def main(arguments: Arguments) -> None:
    results = []
    with tempfile.TemporaryDirectory() as name, quiet():
        folder = Path(name)
        save_language_model(folder / "lm", arguments)
        for batch_size in arguments.batch_sizes:
            data = make_texts(folder / f"texts-{batch_size}", 100 * batch_size, arguments.vocabulary)
            runs = {captures: measure(folder, data, batch_size, captures, arguments) for captures in (False, True)}
            results.append(compare(batch_size, runs))
    if arguments.json:
        about = {"machine": describe_machine(arguments.device), "torch": torch.__version__}
        print(json.dumps({**about, "results": results}, indent=2))
        return
    print(f"{describe_machine(arguments.device)}, torch {torch.__version__}, {arguments.layers} layers")
    for result in results:
        print(
            f"{result['batch_size']:>4} texts a step: {result['tokens_per_second']:>9,} tokens/s, "
            f"captured {result['captured_tokens_per_second']:>9,} tokens/s, {result['ratio']}×; "
            f"{result['captured_shapes']} shapes captured, memory {result['peak_gib']} and "
            f"{result['captured_peak_gib']} GiB, losses {result['first_loss']:.4f} to {result['last_loss']:.4f}, "
            f"which differ by at most {result['largest_difference']:.2g}"
        )


def save_language_model(folder: Path, arguments: Arguments) -> None:
    """Save a random language model with the shape of SmolLM2-135M, or a smaller one."""
    torch.manual_seed(0)
    heads = arguments.width // 64
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.width,
        intermediate_size=arguments.width * 8 // 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_texts(folder: Path, num_texts: int, vocab_size: int) -> RewardData:
    """Random texts with labels 0 and 1, in the files of tokenised data; the label is that of the first token."""
    folder.mkdir()
    random = np.random.default_rng(0)
    lengths = random.geometric(1 / MEAN_LENGTH, num_texts).clip(1, LONGEST)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = random.integers(FIRST_TOKEN, vocab_size, offsets[-1])
    labels = (tokens[offsets[:-1]] % 2).astype(np.float64)[:, None]
    tokens.astype(np.uint16).tofile(folder / "tokens.bin")
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "prompt_lengths.npy", np.zeros(num_texts, np.int32))
    np.save(folder / "weights.npy", np.ones(num_texts, np.float32))
    cells = LabelCells(
        np.full(labels.shape, NUMBER, np.uint8), labels, [[]], np.arange(1, num_texts + 1), [("texts", num_texts)]
    )
    cells.save(folder)
    counts = {"rows": num_texts, "tokens": int(offsets[-1])}
    (folder / "counts.json").write_text(json.dumps({"counts": counts, "dtype": "uint16"}))
    return RewardData(folder, ["praise"], LabelRules(keep=True))


def measure(folder: Path, data: RewardData, batch_size: int, captures: bool, arguments: Arguments) -> dict[str, Any]:
    """Train for some steps; returns the speed after the warm-up, peak memory, and all losses."""
    config = RewardTrainingConfig(
        data=["texts"],
        labels="praise",
        backbone="lm",
        out=str(folder / f"run-{batch_size}-{captures}"),
        epochs=1.0,
        max_steps=arguments.warmup + arguments.steps,
        batch_size=batch_size,
        learning_rate=1e-4,
        warmup_steps=20,
        precision=arguments.precision,  # pyright: ignore[reportArgumentType]
        capture_steps=captures,
        trainer={"use_cpu": arguments.device == "cpu"},
    )
    torch.manual_seed(0)
    trainer = Measured(RadQ.from_backbone(folder / "lm", ["praise"]), config, data)
    clock = Clock(trainer, arguments.warmup)
    trainer.add_callback(clock)
    gc.collect()  # the trainer of the run before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    (began, tokens_before), (ended, tokens) = clock.readings
    return {
        "tokens_per_second": round((tokens - tokens_before) / (ended - began)),
        "milliseconds_per_step": round(1000 * (ended - began) / arguments.steps, 2),
        "peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if torch.cuda.is_available() else 0.0,
        "shapes": 0 if trainer.captured is None else len(trainer.captured),
        "losses": torch.stack(trainer.losses).double().cpu(),
    }


def compare(batch_size: int, runs: dict[bool, dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a run with captured steps beside those of a run without."""
    plain, captured = runs[False], runs[True]
    return {
        "batch_size": batch_size,
        "tokens_per_second": plain["tokens_per_second"],
        "captured_tokens_per_second": captured["tokens_per_second"],
        "ratio": round(captured["tokens_per_second"] / plain["tokens_per_second"], 2),
        "milliseconds_per_step": plain["milliseconds_per_step"],
        "captured_milliseconds_per_step": captured["milliseconds_per_step"],
        "captured_shapes": captured["shapes"],
        "peak_gib": plain["peak_gib"],
        "captured_peak_gib": captured["peak_gib"],
        "first_loss": float(plain["losses"][0]),
        "last_loss": float(captured["losses"][-20:].mean()),
        "largest_difference": float((plain["losses"] - captured["losses"]).abs().max()),
    }


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
