"""The results of a benchmark: times per token and their ratios to decoding without a guide."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from radq.benchmark.config import UNGUIDED, Point
from radq.files import atomic_folder, require_own_folder

if TYPE_CHECKING:
    from radq.report.plots import Plot

DOCUMENT = "bench.json"


@dataclass(frozen=True)
class Spread:
    """The median of some numbers, and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Spread":
        low, _, high = quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else [numbers[0]] * 3
        return cls(median(numbers), low, high)


@dataclass(frozen=True)
class Variant:
    """A guide at a point, with steps that run one operation after the other or as captured CUDA graphs."""

    guide: str
    point: Point
    captured: bool

    @property
    def fields(self) -> dict[str, Any]:
        """The guide, the numbers of the point, and how steps run, by their names in results."""
        return {"guide": self.guide, **asdict(self.point), "captured": self.captured}


@dataclass(frozen=True)
class Timing:
    """The time per token of one variant: of one step, which draws a token for every row and reads it."""

    guide: str
    rows: int
    top_k: int | None  # None: the whole vocabulary
    prompt_tokens: int
    kl_budget: float | None
    captured: bool
    ratio: Spread  # to the time without a guide, at the same point and in the same round
    milliseconds: Spread


@dataclass(frozen=True)
class LeftOut:
    """A variant that was not measured, and why."""

    guide: str
    rows: int
    top_k: int | None
    prompt_tokens: int
    kl_budget: float | None
    captured: bool
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

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, folder: Path, plot: "Plot") -> list[Path]:
        """Write bench.json and the plot, all of them or none, and return their paths."""
        files = {
            DOCUMENT: json.dumps(self.document(), indent=2).encode(),
            f"{plot.name}.svg": plot.themed.encode(),
            f"{plot.name}.png": plot.png,
        }
        with atomic_folder(folder) as temporary:
            for name, content in files.items():
                (temporary / name).write_bytes(content)
        return [folder / name for name in files]


def check_folder(folder: Path) -> None:
    """Refuse to write results into a file, or into a folder with other files."""
    require_own_folder(folder, lambda folder: (folder / DOCUMENT).is_file(), "a folder of radq bench")


def summarise(seconds: Mapping[Variant, Sequence[float]]) -> list[Timing]:
    """Turn the seconds per token of every round into medians. Ratios are taken within rounds, so that other work on
    the machine, which disturbs a whole round alike, drops out.
    """
    found = []
    for variant, times in seconds.items():
        unguided = seconds[Variant(UNGUIDED, variant.point, variant.captured)]
        ratios = [own / base for own, base in zip(times, unguided, strict=True)]
        milliseconds = [1000 * each for each in times]
        found.append(Timing(**variant.fields, ratio=Spread.of(ratios), milliseconds=Spread.of(milliseconds)))
    return found
