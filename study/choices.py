"""The settings of each method, chosen on dev prompts by one rule.

choices/TASK-METHOD.json     the rule, the choice, and all candidates with their numbers
untested/TASK-METHOD.json    the same, of a later choice with which the method has not been tested yet

A candidate is a model (experts have one for each learning rate), a number of candidates k, a nucleus p and, for GeDi, a
filter. Its curve over β is straight between points, over the logarithm of perplexity.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from methods import METHODS, PLAIN_K, TOP_K, Method, Task, name_filter, sweep_name

from radq.files import read_lines

SETTINGS = ("model", "top_k", "top_p", "filter_p")  # of a candidate
TARGET = 1.2  # times the perplexity of the unguided base model at k = PLAIN_K, where candidates are compared
SPAN, NUM_BETAS = (1.03, 1.6), 5  # of the test: where the first and the last β shall lie, and how many there are
RULE = (
    f"Chosen are the settings with the best attribute where perplexity is {TARGET} times that of the unguided base "
    f"model at k = {PLAIN_K}, by straight lines over log perplexity, as a mean over classes of prompts. Settings that "
    "do not reach this perplexity in every class lose; if none do, the closest are chosen. Curves without a filter "
    f"begin with the unguided base model at the same k and p. For the test there are {NUM_BETAS} values of β in equal "
    f"ratios, from {SPAN[0]} to {SPAN[1]} times that perplexity by the same lines, or from a quarter of the weakest β "
    "to the strongest where these do not go so far. The temperature is 1 everywhere."
)


@dataclass(frozen=True)
class Point:
    """One β of a candidate on one class of prompts."""

    beta: float
    ratio: float  # perplexity, as a multiple of the unguided one at PLAIN_K
    attribute: float


@dataclass(frozen=True)
class Candidate:
    """Settings of a method, with their curves by class of prompts."""

    model: str
    top_k: int
    top_p: float | None
    filter_p: float | None
    curves: dict[str, list[Point]]

    @property
    def settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SETTINGS}

    def attribute_at_target(self) -> float:
        """The attribute at the perplexity of comparison, averaged over classes of prompts; NaN if one misses it."""
        return fmean(attribute_at(points, TARGET) for points in self.curves.values())

    def distance(self) -> float:
        """How far, in log perplexity, the farthest class of prompts stays away from the perplexity of comparison."""
        return max(min(abs(np.log(p.ratio / TARGET)) for p in points) for points in self.curves.values())


def attribute_at(points: Sequence[Point], ratio: float) -> float:
    """The attribute at a ratio of perplexities, by straight lines over its logarithm; NaN outside of the points."""
    ordered = sorted(points, key=lambda point: point.ratio)
    places = np.log([point.ratio for point in ordered])
    return float(np.interp(np.log(ratio), places, [p.attribute for p in ordered], left=np.nan, right=np.nan))


def choose(candidates: Sequence[Candidate], side: int) -> Candidate:
    """The best candidate by RULE; `side` is −1 where less of the attribute is better."""
    reaching = [one for one in candidates if not np.isnan(one.attribute_at_target())]
    if reaching:
        return max(reaching, key=lambda one: side * one.attribute_at_target())
    return min(candidates, key=Candidate.distance)


def choose_betas(candidate: Candidate) -> list[float]:
    """Values of β in equal ratios, from the first end of SPAN to the last one."""
    low, high = (fmean(beta_at(points, ratio) for points in candidate.curves.values()) for ratio in SPAN)
    return [float(f"{beta:.3g}") for beta in np.geomspace(low, max(high, 1.5 * low), NUM_BETAS)]


def beta_at(points: Sequence[Point], ratio: float) -> float:
    """The first β that reaches a ratio of perplexities; a quarter of the weakest, or the strongest, where none does."""
    ordered = sorted(points, key=lambda point: point.beta)
    highest = np.maximum.accumulate([point.ratio for point in ordered])
    beta = float(np.interp(np.log(ratio), np.log(highest), [point.beta for point in ordered], left=0.0))
    return max(beta, min(point.beta for point in points if point.beta > 0) / 4)


# --- files ---


def choose_settings(task: Task, method: Method) -> dict[str, Any]:
    """Choose among the settings that were tried on dev prompts; return all that choices/TASK-METHOD.json holds.

    Models of which an earlier choice knows all numbers need not be tried again.
    """
    known = read_known(task, method)
    found = {model: read_candidates(task, method, model) or known.get(model, []) for model in method.models}
    candidates = [one for model in method.models for one in found[model]]
    chosen = choose(candidates, task.side)
    return {
        "rule": RULE,
        "chosen": chosen.settings | {"beta": choose_betas(chosen), "attribute": _known(chosen.attribute_at_target())},
        "missing": [model for model in method.models if not found[model]],
        "candidates": [
            one.settings
            | {"attribute": _known(one.attribute_at_target())}
            | {"curves": {group: [[p.beta, *_rounded(p)] for p in points] for group, points in one.curves.items()}}
            for one in candidates
        ],
    }


def choice_file(task: Task, method: Method) -> str:
    return f"choices/{task.name}-{method.name}.json"


def untested_file(task: Task, method: Method) -> str:
    return f"untested/{task.name}-{method.name}.json"


def read_known(task: Task, method: Method) -> dict[str, list[Candidate]]:
    """The candidates of an earlier choice, by model."""
    file = Path(choice_file(task, method))
    known: dict[str, list[Candidate]] = {}
    for one in json.loads(file.read_text())["candidates"] if file.exists() else ():
        curves = {group: [Point(*point) for point in points] for group, points in one["curves"].items()}
        settings = {name: one[name] for name in SETTINGS}
        known.setdefault(one["model"], []).append(Candidate(**settings, curves=curves))
    return known


def untried_models(task: Task, method: Method) -> tuple[str, ...]:
    """The models whose settings an earlier choice does not know."""
    known = read_known(task, method)
    return tuple(model for model in method.models if model not in known)


def read_choice(folder: Path, task: Task, method: Method) -> dict[str, Any]:
    """The settings that a method is tested with; empty where it has nothing to choose, or nothing was tried."""
    file = folder / choice_file(task, METHODS[method.like or method.name])
    return json.loads(file.read_text())["chosen"] if file.exists() else {}


def read_candidates(task: Task, method: Method, model: str) -> list[Candidate]:
    """The candidates of one model, from its sweeps over dev prompts; none where they were not run."""
    rows = _read_metrics(task, model)
    settings = sorted({(row["top_k"], row["top_p"] or 0) for row in rows})
    return [
        Candidate(model, k, p or None, filter_p, _curves(task, rows, name_filter(filter_p), k, p or None, not filter_p))
        for filter_p, (k, p) in product(method.filters, settings)
    ]


def _curves(
    task: Task, rows: list[dict[str, Any]], guide: str, k: int, p: float | None, from_zero: bool
) -> dict[str, list[Point]]:
    curves = {}
    for group in task.groups:
        here = [row for row in rows if row["group"] == group]
        base = next(row for row in here if (row["guide"], row["top_k"], row["top_p"]) == ("none", PLAIN_K, None))
        names = {guide, "none"} if from_zero else {guide}
        found = [row for row in here if row["guide"] in names and (row["top_k"], row["top_p"]) == (k, p)]
        found = [row for row in found if row["metrics"]["perplexity"]["value"] is not None]  # where it is too large
        curves[group] = sorted((_point(task, row, base) for row in found), key=lambda point: point.beta)
    return curves


def _point(task: Task, row: Mapping[str, Any], base: Mapping[str, Any]) -> Point:
    ratio = row["metrics"]["perplexity"]["value"] / base["metrics"]["perplexity"]["value"]
    return Point(row["beta"] or 0.0, ratio, row["metrics"][task.metric]["value"])


def _read_metrics(task: Task, model: str) -> list[dict[str, Any]]:
    files = [Path("dev") / sweep_name(task, model, k) / "metrics.jsonl" for k in TOP_K]
    return [row for file in files if file.exists() for row in read_lines(file)]


def _rounded(point: Point) -> list[float]:
    return [round(point.ratio, 4), round(point.attribute, 4)]


def _known(value: float) -> float | None:
    return None if np.isnan(value) else round(value, 4)
