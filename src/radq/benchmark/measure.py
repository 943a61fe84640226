"""Times per token of decoding with and without guides.

    result = measure(BenchConfig(lm="gpt2-large"), device="cuda")
    [(timing.guide, timing.ratio.median) for timing in result.timings]

A time is that of steps of the engine on which `radq.generate` runs. A step draws a token for every row, lets all models
read it, and brings the token to the host. Reading the prompts, the first token and turning tokens into text are not
counted.
"""

import json
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from radq.benchmark.config import DOCUMENT, UNGUIDED, BenchConfig, Grid, Point, Variant, why_left_out
from radq.benchmark.guides import GUIDES, BenchModels, load_models
from radq.decoding.config import Steering
from radq.decoding.engine import Engine
from radq.decoding.generate import check_guide
from radq.decoding.request import Request
from radq.decoding.text import encode_prompts
from radq.errors import MemoryLimitError
from radq.files import atomic_folder
from radq.guides.base import Guide
from radq.models.loading import num_logits
from radq.numerics import empty_cache, require_memory_for_texts
from radq.report.plots import Plot

UNTIMED = 2  # tokens of a text beside those that are timed: the first one, and one that is never drawn
MEMORY_HINT = "give smaller --rows or --prompt-tokens, or a smaller --dtype."


# --- results ---


@dataclass(frozen=True)
class Spread:
    """The median of some numbers, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Spread":
        return cls(*np.quantile(numbers, [0.5, 0.25, 0.75]).tolist())


@dataclass(frozen=True, kw_only=True)
class Timing(Variant):
    """The time per token of one variant: of one step, which draws a token for every row and reads it."""

    ratio: Spread  # to the time without a guide, at the same point and in the same round
    milliseconds: Spread


@dataclass(frozen=True, kw_only=True)
class LeftOut(Variant):
    """A variant that was not measured, and why."""

    reason: str


@dataclass(frozen=True)
class BenchResult:
    """All times of a benchmark."""

    lm: str
    reward: str | None  # None: random weights
    machine: str
    device: str
    dtype: str
    torch: str
    vocab_size: int
    new_tokens: int
    rounds: int
    timings: list[Timing]
    left_out: list[LeftOut]

    def save(self, folder: Path, plot: Plot) -> list[Path]:
        """Write bench.json and the plot, all of them or none, and return their paths."""
        files = {
            DOCUMENT: json.dumps(asdict(self), indent=2).encode(),
            f"{plot.name}.svg": plot.themed.encode(),
            f"{plot.name}.png": plot.png,
        }
        with atomic_folder(folder) as temporary:
            for name, content in files.items():
                (temporary / name).write_bytes(content)
        return [folder / name for name in files]


def summarise(seconds: Mapping[Variant, Sequence[float]]) -> list[Timing]:
    """Turn the seconds per token of every round into medians. Ratios are taken within rounds, so that other work on
    the machine, which disturbs a whole round alike, drops out.
    """
    timings = []
    for variant, times in seconds.items():
        unguided = seconds[replace(variant, guide=UNGUIDED)]
        ratio = Spread.of([own / base for own, base in zip(times, unguided, strict=True)])
        milliseconds = Spread.of([1000 * each for each in times])
        timings.append(Timing(**vars(variant), ratio=ratio, milliseconds=milliseconds))
    return timings


# --- all measurements ---


def measure(config: BenchConfig, device: str, progress: bool = False) -> BenchResult:
    """Measure all guides at all points, `config.rounds` times. The variants take turns inside a round."""
    require_memory_for_texts(max(config.rows, default=1), config.new_tokens or 1, MEMORY_HINT)
    models = load_models(config, device)
    grid = config.choose_grid(device, num_logits(models.lm))
    guides = {name: GUIDES[name].make(models) for name in (UNGUIDED, *config.guides)}
    _check_lengths(models, guides.values(), grid)
    variants, left_out = _choose_variants(models, list(guides), grid)
    seconds: dict[Variant, list[float]] = {variant: [] for variant in variants}
    turns = [(number, variant) for number in range(config.rounds + 1) for variant in variants]
    rounds = config.rounds
    try:
        for number, variant in tqdm(turns, desc="measuring", unit="run", disable=not progress):
            if variant not in seconds:
                continue
            steps = grid.new_tokens if number else 1  # the first round only warms up
            taken = time_variant(models, guides[variant.guide], variant, steps)
            if taken is None:
                del seconds[variant]
                left_out.append(LeftOut(**vars(variant), reason="the memory is full"))
            elif number:
                seconds[variant].append(taken)
    except KeyboardInterrupt:  # the rounds that are whole count
        rounds = min(map(len, seconds.values()), default=0)
        if not rounds:
            raise
        seconds = {variant: times[:rounds] for variant, times in seconds.items()}
    return BenchResult(
        lm=config.lm,
        reward=config.reward,
        machine=describe_machine(device),
        device=device,
        dtype=str(models.lm.dtype).removeprefix("torch."),
        torch=torch.__version__,
        vocab_size=num_logits(models.lm),
        new_tokens=grid.new_tokens,
        rounds=rounds,
        timings=summarise(seconds),
        left_out=left_out,
    )


def _check_lengths(models: BenchModels, guides: Iterable[Guide | None], grid: Grid) -> None:
    """Refuse texts that are too long for a model, and guides with another vocabulary."""
    tokens = grid.new_tokens + UNTIMED
    prompt = encode_prompts(models.lm.config, models.tokenizer, [_make_prompt(models, max(grid.prompt_tokens))], tokens)
    for guide in guides:
        if guide is not None:
            check_guide(guide, models.lm, models.tokenizer, prompt, tokens)


def _choose_variants(models: BenchModels, guides: list[str], grid: Grid) -> tuple[list[Variant], list[LeftOut]]:
    """Choose the variants to measure, and name those that would take too long."""
    modes = (False, True) if models.lm.device.type == "cuda" else (False,)
    chosen, left_out = [], []
    for point, captured, guide in product(grid.points, modes, guides):
        variant = Variant(**vars(point), guide=guide, captured=captured)
        reason = why_left_out(variant, num_logits(models.lm), models.device)
        if reason is None:
            chosen.append(variant)
        else:
            left_out.append(LeftOut(**vars(variant), reason=reason))
    return chosen, left_out


# --- one measurement ---


class FixedEngine(Engine):
    """An engine that does not go on with fewer rows when the memory is full."""

    def _go_back(self) -> None:
        raise MemoryLimitError(f"{self.max_rows} rows do not fit into memory.", MEMORY_HINT)


def time_variant(models: BenchModels, guide: Guide | None, variant: Variant, steps: int) -> float | None:
    """Measure the seconds per token of a new engine; None if its rows do not fit into memory together."""
    engine = FixedEngine(models.lm, guide, variant.rows, captures=variant.captured)
    try:
        if variant.captured:  # all steps are captured in a first run
            time_steps(engine, models, variant, steps)
        return time_steps(engine, models, variant, steps)
    except MemoryLimitError:
        if variant.guide == UNGUIDED:
            raise
        return None
    finally:
        engine.decoder.clear()
        empty_cache()


def time_steps(engine: Engine, models: BenchModels, point: Point, steps: int) -> float:
    """Continue one prompt in all rows, and return the seconds per token."""
    for request in _make_requests(models, point, steps + UNTIMED):
        engine.submit(request)
    engine.step()  # reads the prompt and draws the first token
    began = read_clock(models.device)
    for _ in range(steps):
        engine.step()
    seconds = read_clock(models.device) - began
    together = len(engine.running)
    engine.rest()
    if together < point.rows:
        raise MemoryLimitError(f"{point.rows} rows do not fit into memory, only {together}.", MEMORY_HINT)
    return seconds / steps


def _make_requests(models: BenchModels, point: Point, tokens: int) -> Iterator[Request]:
    """Make requests that no stop token ends."""
    prompt, steering = _make_prompt(models, point.prompt_tokens), Steering(point.top_k, kl_budget=point.kl_budget)
    for uniforms in np.random.default_rng(0).random((point.rows, tokens)):
        yield Request(prompt, steering, tokens, uniforms)


def _make_prompt(models: BenchModels, tokens: int) -> list[int]:
    """Draw a prompt of random tokens."""
    return np.random.default_rng(0).integers(models.lm.config.get_text_config().vocab_size, size=tokens).tolist()


def describe_machine(device: str) -> str:
    """The name of the GPU, or of the processor with the number of threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads of {_processor() if device == 'cpu' else device}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def read_clock(device: str) -> float:
    """Seconds, after all work on the device is done."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))
    return time.perf_counter()
