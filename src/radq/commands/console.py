"""Output of the commands, tables for people and JSON for machines, and the number of threads they compute with.

torch takes a thread for every core it sees, also where a container may use only part of their time, or where other
programs keep them busy. All threads then wait for the slowest one, hundreds of times per token. So the threads are
limited to what the process may use, RADQ_THREADS sets their number, and a note says when fewer would be faster. Load
alone never changes the number: sums of floats depend on it in their last digits.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


WIDEST = 10_000  # characters in a line of a table


def console() -> "Console":
    from rich.console import Console

    return Console(highlight=False)


def announce(work: str, as_json: bool) -> None:
    """Say on standard error what the next seconds are spent on, in one process only and not beside JSON.

    A second line says if fewer threads would be faster.
    """
    if as_json or not is_first_process():
        return
    note = describe_contention(STARTED, CoreTimes.read())
    print(f"{work} …", *filter(None, [note]), sep="\n", file=sys.stderr, flush=True)


def is_first_process() -> bool:
    """Whether this process is the only one, or the first of several that a launcher started."""
    return int(os.environ.get("RANK", 0)) == 0


def print_json(document: Any) -> None:
    """Print a document, which may hold paths, as JSON. NaN and infinity, which JSON does not have, become null."""
    document = json.loads(json.dumps(document, default=os.fspath), parse_constant=lambda _: None)
    json.dump(document, sys.stdout, ensure_ascii=False, indent=2)
    print()


def print_table(header: Sequence[str], rows: "Sequence[Sequence[str | Text]]", words: int = 0, title: str = "") -> None:
    """Print a table whose first `words` columns hold words, and whose other columns hold numbers.

    No word or number is cut: in a narrow terminal entries wrap between words, and where that is not enough, or where
    there is no terminal, the table is as wide as it needs to be.
    """
    from rich.cells import cell_len
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None)
    for number, name in enumerate(header):
        longest_word = max(cell_len(word) for row in (header, *rows) for word in str(row[number]).split() or [""])
        table.add_column(Text(name), justify="left" if number < words else "right", min_width=longest_word)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    screen = console()
    needed = Measurement.get(screen, screen.options.update(max_width=WIDEST), table)
    screen.width = max(screen.width, needed.minimum if screen.is_terminal else needed.maximum)
    screen.print(table)


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print named facts, a line each."""
    for name, text in facts:
        print(f"{name}: {text}")


def print_metrics(rows: list[dict[str, Any]]) -> None:
    """Print lines of metrics.jsonl as a table with a row per cell of the sweep and class of prompts."""
    from radq.report.curves import count_group

    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    lines = []
    for row in rows:
        values = (row["metrics"][name]["value"] for name in names)
        numbers = ("-" if value is None else f"{value:.4g}" for value in values)
        lines.append([row["cell"], count_group(row["group"], row.get("prompts")), *numbers])
    print_table(["cell", "prompts", *(name.replace("[", "\n[") for name in names)], lines, words=2)


# --- threads ---

CGROUPS = Path("/sys/fs/cgroup")


def limit_threads() -> None:
    """Set OMP_NUM_THREADS, which torch reads when it is imported, unless the default or the user's value is right."""
    from radq.settings import asked_threads  # not for `radq --help`

    if (asked := asked_threads()) is not None:
        os.environ["OMP_NUM_THREADS"] = str(asked)
    elif "OMP_NUM_THREADS" not in os.environ and usable_cores() < (os.cpu_count() or 1):
        os.environ["OMP_NUM_THREADS"] = str(usable_cores())


def usable_cores() -> int:
    """The cores whose time this process may use: by its affinity, and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(cores, read_quota())))


def read_quota(cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> float:
    """The cores that the control groups of this process grant it; infinite without a limit."""
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        groups = []
    quotas = [_read_pair(cgroups / "cpu" / "cpu.cfs_quota_us", cgroups / "cpu" / "cpu.cfs_period_us")]  # version 1
    for number, _, path in groups:
        folder = cgroups / path.lstrip("/")
        if number == "0":  # version 2, where groups lie in each other
            quotas += [
                _read_pair(group / "cpu.max") for group in (folder, *folder.parents) if group.is_relative_to(cgroups)
            ]
    return min(quotas, default=math.inf)


def _read_pair(*files: Path) -> float:
    """Read quota and period from one file or two; infinite if there is no limit."""
    try:
        quota, period = (int(number) for file in files for number in file.read_text().split())
    except (OSError, ValueError):  # there is no such file, or it says "max"
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


# --- cores that other programs use ---


@dataclass(frozen=True)
class CoreTimes:
    """Seconds since some moment: of the clock, idle ones of all cores together, and those this process has computed."""

    clock: float
    idle: float
    own: float

    @classmethod
    def read(cls) -> "CoreTimes | None":
        """Read them now; None where the system does not tell."""
        try:
            idle = int(Path("/proc/stat").read_text().split()[4]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return None
        return cls(time.monotonic(), idle, time.process_time())


def describe_contention(before: CoreTimes | None, now: CoreTimes | None) -> str | None:
    """A note for the user if, between two moments, other programs left this process fewer cores than threads."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    wanted = int(threads) if threads.isdigit() else usable_cores()
    if before is None or now is None or now.clock <= before.clock:
        return None
    free = (now.idle - before.idle + now.own - before.own) / (now.clock - before.clock)
    fewer = max(1, math.floor(free + 0.5))
    if fewer >= wanted:
        return None
    return f"note: other programs use the cores, so {wanted} threads may be slow; RADQ_THREADS={fewer} may be faster."


STARTED = CoreTimes.read()  # the command line imports this module first
