"""The cost of each cell of a sweep: time, calls and tokens of the guide's experts, and memory."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radq.files import read_lines

if TYPE_CHECKING:  # reports read costs without torch
    from radq.guides.meter import Meter

SUMMED = ("seconds", "tokens", "steps", "calls", "expert_tokens")


@dataclass(frozen=True)
class Usage:
    """Steps, calls and tokens of a guide's experts for some continuations, prompts aside; zeros without a guide."""

    steps: int = 0
    calls: int = 0
    expert_tokens: int = 0

    @classmethod
    def of(cls, meter: "Meter") -> "Usage":
        return cls(meter.steps, meter.continuations.calls, int(meter.continuations.tokens))

    def since(self, before: "Usage") -> "Usage":
        return Usage(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))


def describe_cost(
    cell: str, generations: Sequence[Any], usage: Usage | None, seconds: float, device: str
) -> dict[str, Any]:
    """Make a line of costs.jsonl for some generations of a cell. `usage` is None where it was not counted."""
    from radq.numerics import peak_memory

    known: dict[str, Any] = dict.fromkeys(("steps", "calls", "expert_tokens")) if usage is None else asdict(usage)
    tokens = sum(len(generation.token_ids) for generation in generations)
    return {"cell": cell, "seconds": seconds, "tokens": tokens, **known, "peak_memory": peak_memory(device)}


def read_costs(folder: Path) -> dict[str, dict[str, float]]:
    """Read costs.jsonl into tokens per second, calls and tokens of experts per token, and peak memory of each cell.

    The best of n has no steps, so no calls per token. Chunks that were generated again after a kill count twice.
    """
    sums: dict[str, dict[str, float]] = {}
    file = folder / "costs.jsonl"
    for row in read_lines(file) if file.exists() else ():
        cell = sums.setdefault(row["cell"], dict.fromkeys((*SUMMED, "peak_memory"), 0))
        for name in SUMMED:
            cell[name] += math.nan if row[name] is None else row[name]  # a sum with an unknown part is unknown
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
