"""What the cells of a sweep cost: time, what the guides' experts read, memory."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from radq.files import read_lines
from radq.guides.meter import Meter
from radq.numerics import peak_memory

SUMMED = ("seconds", "tokens", "steps", "calls", "expert_tokens")


@dataclass(frozen=True)
class Usage:
    """What the experts of a guide did for some continuations, prompts aside; nothing without a guide."""

    steps: int = 0
    calls: int = 0
    expert_tokens: int = 0

    @classmethod
    def of(cls, meter: Meter) -> "Usage":
        return cls(meter.steps, meter.continuations.calls, int(meter.continuations.tokens))


def describe_cost(
    cell: str, generations: Sequence[Any], usage: Usage | None, seconds: float, device: str
) -> dict[str, Any]:
    """A line of costs.jsonl, for some generations of a cell."""
    known: dict[str, Any] = dict.fromkeys(("steps", "calls", "expert_tokens")) if usage is None else asdict(usage)
    tokens = sum(len(generation.token_ids) for generation in generations)
    return {"cell": cell, "seconds": seconds, "tokens": tokens, **known, "peak_memory": peak_memory(device)}


def read_costs(folder: Path) -> dict[str, dict[str, float]]:
    """Of each cell: tokens per second, calls and tokens of the guide's experts, prompts aside, and peak memory.

    The best of n has no steps, so no calls per token. A chunk that a kill undid counts as well: it was paid for.
    """
    sums: dict[str, dict[str, float]] = {}
    file = folder / "costs.jsonl"
    for row in read_lines(file) if file.exists() else ():
        cell = sums.setdefault(row["cell"], dict.fromkeys((*SUMMED, "peak_memory"), 0))
        for name in SUMMED:
            cell[name] += math.nan if row[name] is None else row[name]  # of what was not counted there is no sum
        cell["peak_memory"] = max(cell["peak_memory"], row["peak_memory"])
    return {name: _rates(cell) for name, cell in sums.items()}


def _rates(cell: dict[str, float]) -> dict[str, float]:
    rates = {
        "tokens_per_second": cell["tokens"] / cell["seconds"],
        "calls_per_token": cell["calls"] / cell["steps"] if cell["steps"] else math.nan,
        "expert_tokens_per_token": cell["expert_tokens"] / cell["tokens"],
        "peak_memory": cell["peak_memory"],
    }
    return {name: rate for name, rate in rates.items() if not math.isnan(rate)}
