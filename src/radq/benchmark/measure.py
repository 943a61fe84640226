"""Times per token of decoding with and without guides.

    result = measure(BenchConfig(lm="gpt2-large"), device="cuda")
    [(timing.guide, timing.ratio.median) for timing in result.timings]

A time is that of steps of the engine on which `radq.generate` runs. A step draws a token for every row, lets all models
read it, and brings the token to the host. Reading the prompts, the first token and turning tokens into text are not
counted.
"""

import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from radq.benchmark.config import UNGUIDED, BenchConfig, Grid, Point, why_left_out
from radq.benchmark.guides import GUIDES
from radq.benchmark.models import BenchModels, load_models
from radq.benchmark.result import BenchResult, LeftOut, Variant, summarise
from radq.decoding.config import Steering
from radq.decoding.engine import Engine
from radq.decoding.generate import check_guide
from radq.decoding.request import Request
from radq.decoding.text import encode_prompts
from radq.errors import MemoryLimitError
from radq.guides import Guide
from radq.models.loading import num_logits
from radq.numerics import empty_cache, require_memory_for_texts

UNTIMED = 2  # tokens of a text beside those that are timed: the first one, and one that is never drawn
MEMORY_HINT = "give smaller --rows or --prompt-tokens, or a smaller --dtype."


def measure(config: BenchConfig, device: str, progress: bool = False) -> BenchResult:
    """Measure all guides at all points, `config.rounds` times. The variants take turns inside a round."""
    require_memory_for_texts(max(config.rows, default=1), config.new_tokens or 1, MEMORY_HINT)
    models = load_models(config, device)
    grid = config.choose_grid(device, num_logits(models.lm))
    guides = {name: GUIDES[name].make(models) for name in config.guide_names}
    _check_room(models, guides.values(), grid)
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
                left_out.append(_leave_out(variant, "the memory is full"))
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


def _check_room(models: BenchModels, guides: Iterable[Guide | None], grid: Grid) -> None:
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
    for point in grid.points:
        for variant in (Variant(guide, point, captured) for captured in modes for guide in guides):
            reason = why_left_out(variant.guide, point, num_logits(models.lm), models.device)
            if reason is None:
                chosen.append(variant)
            else:
                left_out.append(_leave_out(variant, reason))
    return chosen, left_out


def _leave_out(variant: Variant, reason: str) -> LeftOut:
    return LeftOut(**variant.fields, reason=reason)


# --- one measurement ---


class FixedEngine(Engine):
    """An engine that does not go on with fewer rows when the memory is full."""

    def _go_back(self) -> None:
        raise MemoryLimitError(f"{self.max_rows} rows do not fit into memory.", MEMORY_HINT)


def make_engine(models: BenchModels, guide: Guide | None, variant: Variant) -> Engine:
    return FixedEngine(models.lm, guide, variant.point.rows, captures=variant.captured)


def time_variant(models: BenchModels, guide: Guide | None, variant: Variant, steps: int) -> float | None:
    """Measure the seconds per token of a new engine; None if its rows do not fit into memory together."""
    engine = make_engine(models, guide, variant)
    try:
        if variant.captured:  # all steps are captured in a first run
            time_steps(engine, models, variant.point, steps)
        return time_steps(engine, models, variant.point, steps)
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
