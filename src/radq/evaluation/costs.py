"""What the cells of a sweep cost: time, what the guides' experts read, memory."""

from pathlib import Path
from typing import Any

from radq.decoding import Generation
from radq.evaluation.lines import read_lines
from radq.memory import peak_memory
from radq.metering import Meter

SUMMED = ("seconds", "tokens", "steps", "calls", "expert_tokens")


def describe_cost(
    cell: str, generations: list[Generation], meter: Meter | None, seconds: float, device: str
) -> dict[str, Any]:
    """A line of costs.jsonl, for some generations of a cell; the unguided base has no meter."""
    reading = None if meter is None else meter.continuations
    return {
        "cell": cell,
        "seconds": seconds,
        "tokens": sum(len(generation.token_ids) for generation in generations),
        "steps": 0 if meter is None else meter.steps,
        "calls": 0 if reading is None else reading.calls,
        "expert_tokens": 0 if reading is None else int(reading.tokens),
        "peak_memory": peak_memory(device),
    }


def read_costs(folder: Path) -> dict[str, dict[str, float]]:
    """Of each cell: tokens per second, calls and tokens of the guide's experts, prompts aside, and peak memory.

    The best of n has no steps, so no calls per token. A chunk that a kill undid counts as well: it was paid for.
    """
    sums: dict[str, dict[str, float]] = {}
    file = folder / "costs.jsonl"
    for row in read_lines(file) if file.exists() else ():
        cell = sums.setdefault(row["cell"], dict.fromkeys((*SUMMED, "peak_memory"), 0))
        for name in SUMMED:
            cell[name] += row[name]
        cell["peak_memory"] = max(cell["peak_memory"], row["peak_memory"])
    return {name: _rates(cell) for name, cell in sums.items()}


def _rates(cell: dict[str, float]) -> dict[str, float]:
    rates = {"tokens_per_second": cell["tokens"] / cell["seconds"]}
    if cell["steps"]:
        rates["calls_per_token"] = cell["calls"] / cell["steps"]
    return rates | {
        "expert_tokens_per_token": cell["expert_tokens"] / cell["tokens"],
        "peak_memory": cell["peak_memory"],
    }
