"""The kept numbers of the contest by place: a task and a class of prompts, with the cells of all methods there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bases import BaseModel, read_base
from choices import TARGET, read_choice
from costs import read_costs
from kept import KeptCell, read_kept, read_kept_prompts
from methods import BASE, METHODS, TASKS, TRAININGS, UNGUIDED, Task

from radq.errors import OptionError
from radq.evaluation.comparison import AXES, Point, compare_curves
from radq.evaluation.estimates import Bootstrap, Estimate, estimate
from radq.evaluation.metrics import corpus_perplexity, positive_rate
from radq.files import read_lines

NAN, NOT_RUN = float("nan"), "not run"
SECOND_JUDGE = {
    "sentiment": "positive_rate[minilm]",
    "toxicity": "avg_max[bert-tiny]",
}  # their metrics
OTHER_PERPLEXITY = "other_perplexity"  # of kept texts under another language model


@dataclass(frozen=True)
class Place:
    """What was measured of a task on one class of prompts."""

    base_model: BaseModel
    task: Task
    group: str
    rows: np.ndarray  # the places of its prompts among those of the task
    cells: Mapping[str, Sequence[KeptCell]]  # by method; a method that was not run has none
    chosen: Mapping[str, Mapping[str, Any]]  # settings by method
    mauve: Mapping[tuple[str, str], float]  # by method and cell
    costs: Mapping[str, float]  # time per token by method, as multiples of no guide

    @property
    def base(self) -> KeptCell | None:
        """The unguided base model that all others are compared with."""
        return next((cell for cell in self.cells[BASE] if cell.settings["seed"] == 0), None)

    def value(self, cell: KeptCell, metric: str) -> float:
        return cell.take(metric, self.rows).value if metric in cell.sums else NAN

    def estimate(self, cell: KeptCell, metric: str, bootstrap: Bootstrap) -> Estimate:
        return estimate(cell.take(metric, self.rows), bootstrap)

    def ratio(self, cell: KeptCell) -> float:
        """Perplexity as a multiple of the unguided one."""
        return NAN if self.base is None else self.value(cell, "perplexity") / self.value(self.base, "perplexity")

    def guided(self, method: str) -> list[KeptCell]:
        return [cell for cell in self.cells[method] if cell.settings["guide"] != UNGUIDED]

    def curve(self, method: str) -> list[KeptCell]:
        """The cells of a method, and of the unguided base model where β = 0 means the same."""
        return self.guided(method) if self.settings(method).get("filter_p") else list(self.cells[method])

    def settings(self, method: str) -> Mapping[str, Any]:
        """What was chosen on dev prompts; empty for a method that had nothing to choose."""
        return self.chosen[method]

    def at_ratio(self, method: str, metric: str, ratio: float) -> float:
        """A metric of a curve where perplexity is a multiple of the unguided one; NaN where it is not reached."""
        points = sorted((np.log(self.ratio(cell)), self.value(cell, metric)) for cell in self.curve(method))
        places, values = np.array(points).reshape(-1, 2).T
        return float(np.interp(np.log(ratio), places, values, left=NAN, right=NAN)) if len(points) else NAN

    def unguided_spread(self) -> float:
        """How far apart the attributes of equal unguided cells are, at most: methods may be tested in several runs."""
        found: dict[tuple[Any, ...], list[float]] = {}
        for cells in self.cells.values():
            for cell in cells:
                if cell.settings["guide"] == UNGUIDED:
                    settings = tuple(cell.settings[name] for name in ("top_k", "top_p", "seed"))
                    found.setdefault(settings, []).append(self.value(cell, self.task.metric))
        return max((max(values) - min(values) for values in found.values()), default=0.0)

    def best(self, method: str) -> KeptCell | None:
        """The guided cell with the best attribute, for methods without β."""
        cells = self.guided(method)
        return max(cells, key=lambda cell: self.task.side * self.value(cell, self.task.metric), default=None)

    def shown(self, method: str) -> KeptCell | None:
        """The cell that stands for a method where a single one must."""
        if method == BASE:
            return self.base
        return self.nearest(method) if METHODS[method].has_curve else self.best(method)

    def nearest(self, method: str) -> KeptCell | None:
        """The guided cell whose perplexity is nearest to that at which settings were chosen."""
        return min(self.guided(method), key=lambda cell: abs(np.log(self.ratio(cell) / TARGET)), default=None)


def read_places(folder: Path) -> list[Place]:
    """Read all places of a measured contest."""
    if not folder.is_dir():
        raise OptionError(f"there is no folder {str(folder)!r}.", "give the folder of a contest.")
    mauve, base_model, costs = read_mauve(folder), read_base(folder), read_costs(folder)
    places = []
    for task in TASKS.values():
        prompts = read_kept_prompts(folder, task.name)
        cells = {method: _read_cells(folder, task, method) for method in METHODS}
        chosen = {name: read_choice(folder, task, method) for name, method in METHODS.items()}
        for group in task.groups:
            here = {(m, cell): value for (t, m, cell, g), value in mauve.items() if (t, g) == (task.name, group)}
            places.append(Place(base_model, task, group, prompts.rows(group), cells, chosen, here, costs))
    return places


def _read_cells(folder: Path, task: Task, method: str) -> list[KeptCell]:
    """The cells of a method, with the sums of the second judge and of another perplexity, where they were measured."""
    cells = read_kept(folder, task.name, method)
    scores = second_file(folder, task.name, method)
    if scores.exists():
        with np.load(scores, allow_pickle=False) as arrays:
            for cell in cells:
                cell.sums[SECOND_JUDGE[task.name]] = positive_rate(arrays[cell.name].astype(np.float64)[:, None])
    likelihoods = likelihood_file(folder, task.name, method)
    if likelihoods.exists():
        with np.load(likelihoods, allow_pickle=False) as arrays:
            for cell in cells:
                nll, tokens = arrays[cell.name].astype(np.float64)[:, :, None]
                cell.sums[OTHER_PERPLEXITY] = corpus_perplexity(nll, tokens.astype(int))
    return cells


def second_file(folder: Path, task: str, method: str) -> Path:
    return folder / "second" / f"{task}-{method}.npz"


def likelihood_file(folder: Path, task: str, method: str) -> Path:
    return folder / "second" / f"likelihood-{task}-{method}.npz"


def read_mauve(folder: Path) -> dict[tuple[str, str, str, str], float]:
    """MAUVE by task, method, cell and class of prompts."""
    file = folder / "second" / "mauve.jsonl"
    rows = read_lines(file) if file.exists() else ()
    return {(row["task"], row["method"], row["cell"], row["group"]): row["value"] for row in rows}


# --- comparisons ---


@dataclass(frozen=True)
class Gain:
    """How much better our method is than another one at equal perplexity or KL; `reason` says why it is not known."""

    estimate: Estimate
    reason: str = ""

    @property
    def word(self) -> str:
        if self.reason:
            return self.reason
        low, high = self.estimate.low, self.estimate.high
        return "better" if low > 0 else "worse" if high < 0 else "cannot be told"


@dataclass(frozen=True)
class Pair:
    """A method of ours, in one or more trainings, and another one that it is compared with."""

    ours: str  # as a sentence names it
    trainings: Sequence[str]
    other: str


READOUT_PAIRS = [Pair("the readout", TRAININGS, name) for name in METHODS if name not in (*TRAININGS, BASE)]
OTHER_PAIRS = [
    Pair("RAD-Q", ("rad-q",), "dexperts"),
    Pair("RAD-Q", ("rad-q",), "gedi"),
    Pair("the readout of GeDi", ("readout-gedi",), "gedi"),
]


def find_gain(
    place: Place, pair: Pair, axis: str, metric: str, bootstrap: Bootstrap, measured_as: str | None = None
) -> Gain:
    """Compare all trainings of our method with another one; the interval spans those of all trainings.

    So it holds what resampled prompts change, and what another training changes. `measured_as` names the kept metric
    of the axis if it has another name.
    """
    across = measured_as or axis
    theirs = _points(place, _compared_cells(place, pair.other), across, metric)
    found, reason = [], NOT_RUN
    for training in pair.trainings:
        cells = place.curve(training) if len(theirs) == 1 else place.guided(training)
        ours = _points(place, cells, across, metric)
        if len(ours) < 2 or not theirs:
            continue
        try:
            found.append(compare_curves(axis, ours, theirs, bootstrap))
        except OptionError:
            reason = f"never at the same {AXES[axis].noun}"
    if not found:
        return Gain(Estimate(NAN, NAN, NAN), reason)
    ends = [place.task.side * end for one in found for end in (one.low, one.high)]
    value = place.task.side * sum(one.value for one in found) / len(found)
    return Gain(Estimate(value, min(ends), max(ends)))


def _compared_cells(place: Place, method: str) -> list[KeptCell]:
    """The curve of a method, or its best cell where it has no β."""
    if METHODS[method].has_curve:
        return place.guided(method)
    best = place.best(method)
    return [] if best is None else [best]


def _points(place: Place, cells: Sequence[KeptCell], axis: str, metric: str) -> list[Point]:
    known = [cell for cell in cells if metric in cell.sums and axis in cell.sums]
    return [(cell.take(axis, place.rows), cell.take(metric, place.rows)) for cell in known]
