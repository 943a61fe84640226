"""radq bench --lm gpt2-large --device cuda --out runs/bench: measure the time per token of all guides."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from radq.benchmark.config import BenchConfig, check_folder
from radq.commands.console import announce, print_json, print_table
from radq.errors import require_package

if TYPE_CHECKING:
    from collections.abc import Callable

    from radq.benchmark.measure import BenchResult, Timing


@dataclass
class Arguments(BenchConfig):
    """Measure the time per token of RAD-Q, RAD-V, DExperts and GeDi, and of naive ways to compute the same rewards, as
    multiples of decoding without a guide."""

    out: Path | None = None
    """Folder for bench.json and the plot, bench.svg and bench.png."""
    json: bool = False
    """Print all times and ratios as JSON."""


def run(arguments: Arguments) -> None:
    arguments.check()
    if arguments.out is not None:
        check_folder(arguments.out)
        require_package("matplotlib", "report")
    announce(f"loading {arguments.lm}", arguments.json)
    from radq.benchmark.measure import measure
    from radq.benchmark.plot import plot_bench
    from radq.models.loading import find_device

    result = measure(arguments, find_device(arguments.device), progress=not arguments.json)
    written = [] if arguments.out is None else result.save(arguments.out, plot_bench(result))
    if arguments.json:
        print_json(asdict(result))
        return
    _print_result(result)
    for file in written:
        print(f"  {file}")


def _print_result(result: "BenchResult") -> None:
    from radq.benchmark.guides import GUIDES

    reward = "a random reward model" if result.reward is None else result.reward
    print(f"{result.lm} with {reward} in {result.dtype} on {result.machine}, torch {result.torch}")
    print(f"medians of {result.rounds} rounds with {result.new_tokens} tokens each")
    print("\ntimes as multiples of unguided decoding")
    _print_timings(result, lambda timing: f"{timing.ratio.median:.2f}")
    print("\nmilliseconds per token of all rows together")
    _print_timings(result, lambda timing: f"{timing.milliseconds.median:.1f}")
    reasons = (
        f"{GUIDES[part.guide].title}, rows {part.rows}, k {part.top_k or 'all'}: {part.reason}"
        for part in result.left_out
    )
    for reason in dict.fromkeys(reasons):
        print(f"not measured: {reason}")


def _print_timings(result: "BenchResult", write: "Callable[[Timing], str]") -> None:
    """Print a table with a row for each point, and a column for each guide."""
    from radq.benchmark.guides import GUIDES

    is_gpu = result.device.startswith("cuda")
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for timing in result.timings:
        steps = ("captured" if timing.captured else "eager",) if is_gpu else ()
        k = "all" if timing.top_k is None else str(timing.top_k)
        point = (*steps, str(timing.rows), k, str(timing.prompt_tokens))
        cells.setdefault(point, {})[timing.guide] = write(timing)
    guides = list(dict.fromkeys(timing.guide for timing in result.timings))
    header = [*["steps"] * is_gpu, "rows", "k", "prompt", *(GUIDES[guide].title for guide in guides)]
    lines = [[*point, *(row.get(guide, "-") for guide in guides)] for point, row in cells.items()]
    print_table(header, lines, words=int(is_gpu))
