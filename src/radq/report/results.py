"""Results of sweeps: the run folders that `radq eval` writes, read and checked.

    run = read_runs([Path("runs/detox")])[0]
    run.results[0].metrics["avg_max"].value

metrics.jsonl has a line per cell (a setting of the sweep) and class of prompts, costs.jsonl what each cell took,
differences.jsonl a line per pair of guides, generations.jsonl one per cell and prompt. A last line without an end is
what a killed sweep leaves behind: it is left out, with a note. Names and texts come from models and strangers: what
cannot be shown is replaced on reading.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from radq.errors import DataError, OptionError
from radq.evaluation.metrics import METRICS, Estimate
from radq.evaluation.sweep.config import UNGUIDED
from radq.evaluation.sweep.costs import read_costs

NAN = float("nan")


@dataclass(frozen=True)
class Result:
    """What was measured of one cell on one class of prompts."""

    run: str
    cell: str
    guide: str
    unguided: bool
    beta: float | None
    top_k: int | None
    top_p: float | None
    kl_budget: float | None
    seed: int
    group: str
    metrics: dict[str, Estimate]  # the name of a metric, or metric[judge]
    cost: dict[str, float]


@dataclass(frozen=True)
class GuideDifference:
    """How much more of a metric the first guide has than the second at equal perplexity; NaN where they never are."""

    first: str
    second: str
    metric: str
    group: str
    value: float
    low: float
    high: float
    perplexity_range: tuple[float, float]


@dataclass(frozen=True)
class Sample:
    """A prompt and some of its continuations by each cell."""

    group: str
    prompt: str
    continuations: dict[tuple[str, str], list[str]]  # by run and cell


@dataclass(frozen=True)
class Run:
    """A run folder, less its texts."""

    name: str
    folder: Path
    config: str | None
    results: list[Result]
    differences: list[GuideDifference]
    notes: list[str] = field(default_factory=list)  # what a reader of the report should know


def metric_and_judge(key: str) -> tuple[str, str]:
    """avg_max[judge] → avg_max and the judge, which is empty where a run has one alone."""
    metric, _, judge = key.partition("[")
    return metric, judge.removesuffix("]")


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Run folders; guides that several of them have are told apart by the folder's name."""
    if not folders:
        raise OptionError("there is no run.", "give a folder that radq eval has written.")
    resolved = [folder.resolve() for folder in folders]
    twice = [folder for folder, count in Counter(resolved).items() if count > 1]
    if twice:
        raise OptionError(f"{str(twice[0])!r} is given twice.", "name each run once.")
    names = [folder.name for folder in resolved]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs = [_read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    guides = Counter(guide for run in runs for guide in {result.guide for result in run.results})
    return [_with_prefix(run, {guide for guide, count in guides.items() if count > 1}) for run in runs]


def _with_prefix(run: Run, clashing: set[str]) -> Run:
    def renamed(guide: str) -> str:
        return f"{run.name}/{guide}" if guide in clashing else guide

    results = [replace(result, guide=renamed(result.guide)) for result in run.results]
    pairs = [replace(pair, first=renamed(pair.first), second=renamed(pair.second)) for pair in run.differences]
    return replace(run, results=results, differences=pairs)


def _read_run(folder: Path, name: str) -> Run:
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"{str(folder)!r} has no metrics.jsonl.", "give a folder that radq eval has written.")
    notes: list[str] = []
    results: dict[tuple[str, str], Result] = {}
    costs = read_costs(folder)
    for place, row in _rows(folder / "metrics.jsonl", notes):
        result = _read_result(place, row, name, costs)
        if (result.cell, result.group) in results:
            notes.append(f"{place}: the cell {result.cell!r} is there twice; this line counts.")
        results[result.cell, result.group] = result
    if not results:
        raise DataError(f"{str(folder / 'metrics.jsonl')!r} has no results.", "let radq eval finish a cell first.")
    pairs = list(_rows(folder / "differences.jsonl", notes))
    several = len({_setting(row) for _, row in pairs}) > 1
    differences = [_read_difference(place, row, _setting(row) if several else "") for place, row in pairs]
    config = folder / "config.yaml"
    text = printable(config.read_text(encoding="utf-8", errors="replace")) if config.is_file() else None
    return Run(name, folder, text, list(results.values()), differences, notes)


def read_samples(runs: Sequence[Run], prompts: int = 5, continuations: int = 3) -> list[Sample]:
    """The first prompts of each class in generations.jsonl, as all measured cells of all runs continue them.

    The files may be larger than memory: they are read line by line, and only what is returned is kept. What is wrong
    with them is added to the notes of their runs.
    """
    chosen: dict[str, dict[str, Sample]] = {}
    for run in runs:
        cells = {result.cell for result in run.results}
        for place, row in _rows(run.folder / "generations.jsonl", run.notes):
            group, cell, prompt = _name(place, row, "group"), _name(place, row, "cell"), _text(place, row, "text")
            found = chosen.setdefault(group, {})
            if cell in cells and (prompt in found or len(found) < prompts):
                sample = found.setdefault(prompt, Sample(group, prompt, {}))
                texts = _texts(place, row, "continuations")[:continuations]
                sample.continuations[run.name, cell] = [printable(text) for text in texts]
    return [sample for found in chosen.values() for sample in found.values()]


def printable(text: str) -> str:
    """Without control characters and halves of surrogate pairs, which neither XML nor UTF-8 can hold."""
    return "".join(
        "\ufffd" if unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t" else character
        for character in text
    )


# --- lines ---


def _rows(file: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line with its place in the file, for errors; none where there is no file, which is noted."""
    if not file.is_file():
        notes.append(f"{str(file.parent)!r} has no {file.name}.")
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{file}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    notes.append(f"{place}: the last line is cut off, and left out.")
                    return
                raise DataError(
                    f"{place} is damaged: {_short(line.decode(errors='replace').strip())}.", "run radq eval again."
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"{place}: found {_short(row)}.", "an object is wanted on every line.")
            yield place, row


def _read_result(place: str, row: dict[str, Any], run: str, costs: dict[str, dict[str, float]]) -> Result:
    metrics, guide = row.get("metrics"), _name(place, row, "guide")
    if not isinstance(metrics, dict):
        raise DataError(f"{place}: metrics are {_short(metrics)}.", "an object is wanted there.")
    return Result(
        run=run,
        cell=_name(place, row, "cell"),
        guide=guide,
        unguided=guide == UNGUIDED,
        beta=_optional(place, row, "beta"),
        top_k=None if row.get("top_k") is None else _integer(place, row, "top_k"),
        top_p=_optional(place, row, "top_p"),
        kl_budget=_optional(place, row, "kl_budget"),
        seed=_integer(place, row, "seed"),
        group=_name(place, row, "group"),
        metrics={_metric(place, key): _read_estimate(place, key, value) for key, value in metrics.items()},
        cost=costs.get(_text(place, row, "cell"), {}),
    )


def _read_estimate(place: str, key: str, value: Any) -> Estimate:
    if value is None:
        return Estimate(NAN, NAN, NAN)
    if not isinstance(value, dict):
        raise DataError(f"{place}: {key} is {_short(value)}.", "value, low and high are wanted there.")
    middle, low, high = (_number(place, value, name) for name in ("value", "low", "high"))
    skipped, infinite = (_integer(place, {name: value.get(name) or 0}, name) for name in ("skipped", "infinite"))
    return Estimate(middle, low, high, skipped, infinite)


def _setting(row: dict[str, Any]) -> str:
    """Candidates and seed of a pair, which tell pairs of the same guides apart."""
    names = {"top_k": "k", "top_p": "p", "kl_budget": "kl", "seed": "seed"}
    return "".join(f", {short}={row[name]}" for name, short in names.items() if row.get(name) is not None)


def _read_difference(place: str, row: dict[str, Any], setting: str) -> GuideDifference:
    limits = row.get("perplexity") or [None, None]
    if not isinstance(limits, list) or len(limits) != 2:
        raise DataError(f"{place}: perplexity is {_short(limits)}.", "the two ends of the common range are wanted.")
    low, high = (_number(place, {"perplexity": limit}, "perplexity") for limit in limits)
    return GuideDifference(
        first=_name(place, row, "first"),
        second=_name(place, row, "second"),
        metric=_metric(place, _name(place, row, "metric")),
        group=_name(place, row, "group") + printable(setting),
        value=_number(place, row, "value"),
        low=_number(place, row, "low"),
        high=_number(place, row, "high"),
        perplexity_range=(low, high),
    )


def _metric(place: str, key: str) -> str:
    name, _ = metric_and_judge(key)
    if name not in METRICS:
        raise DataError(f"{place}: there is no metric {name!r}.", f"those there are: {', '.join(METRICS)}.")
    return " ".join(printable(key).split())


def _text(place: str, row: dict[str, Any], name: str) -> str:
    if not isinstance(row.get(name), str):
        raise DataError(f"{place}: {name} is {_short(row.get(name))}.", "a text is wanted there.")
    return printable(row[name])


def _texts(place: str, row: dict[str, Any], name: str) -> list[str]:
    texts = row.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{place}: {name} are {_short(texts)}.", "a list of texts is wanted there.")
    return texts


def _name(place: str, row: dict[str, Any], name: str) -> str:
    return " ".join(_text(place, row, name).split())


def _optional(place: str, row: dict[str, Any], name: str) -> float | None:
    number = row.get(name)
    if number is not None and not isinstance(number, int | float):
        raise DataError(f"{place}: {name} is {_short(number)}.", "a number or null is wanted there.")
    return None if number is None or number != number else number


def _number(place: str, row: dict[str, Any], name: str) -> float:
    number = _optional(place, row, name)
    return NAN if number is None else float(number)


def _integer(place: str, row: dict[str, Any], name: str) -> int:
    number = _optional(place, row, name)
    if number is None or not isfinite(number) or number != int(number):
        raise DataError(f"{place}: {name} is {_short(row.get(name))}.", "a whole number is wanted there.")
    return int(number)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
