"""The numbers of the contest that are kept: small files, from which everything on the page can be computed again.

    python study/kept.py TASK METHOD        (in the study's folder, after the method's sweep)

kept/TASK-METHOD.npz         CELL/METRIC: the totals and weights of each prompt whose sums make a metric, (2, p) float32
kept/TASK-METHOD.jsonl.xz    a line per cell: its settings, and the first sample of 500 prompts of each class
kept/prompts/TASK.jsonl.xz   a line per prompt: a digest of its text, which belongs to another data set, and its class
second/TASK-METHOD.npz       CELL: the score of each prompt's text by a second judge
second/likelihood-TASK-METHOD.npz   CELL: negative log-likelihood and number of tokens of each prompt's text under
                             another language model, (2, p)
second/mauve.jsonl           a line per method and class of prompts: MAUVE of the cell that stands for the method

second/judge.json            AUC and accuracy of a second judge of sentiment, over MiniLM, on texts that it has not seen

A `Place` is what was measured of a task on one class of prompts.
"""

import hashlib
import json
import lzma
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from contest import BASE, METHODS, TARGET, TASKS, TRAININGS, UNGUIDED, Request, Task, attribute_at, read_choice
from models import RADQ, BaseModel, Job, keep_json, read_base, run_all, write_json

from radq import load
from radq.data.prompts import read_prompts
from radq.errors import OptionError
from radq.evaluation.comparison import AXES, Point, compare_curves
from radq.evaluation.estimates import Bootstrap, Estimate, Sums
from radq.evaluation.metrics import (
    MAUVE_MIN_SAMPLES,
    METRICS,
    corpus_perplexity,
    mauve,
    metric_and_judge,
    positive_rate,
)
from radq.evaluation.perplexity import measure_likelihoods
from radq.evaluation.sweep.config import Sweep, list_judged, load_sweep
from radq.evaluation.sweep.measure import MeasuredCell, read_measured_cells
from radq.files import append_lines, atomic_file, read_lines
from radq.judges.agreement import measure_agreement
from radq.judges.base import Judge
from radq.judges.models import load_judge
from radq.judges.readers import load_encoder
from radq.models.loading import find_device
from radq.report.results import NAN

SETTINGS = ("guide", "beta", "top_k", "top_p", "seed", "best_of", "ask")
KEPT_TEXTS = 500  # of each class of prompts; the texts of others are blank
EXPONENTIAL = ("corpus_perplexity",)  # metrics that are exp of a ratio of sums
NOT_RUN = "not run"
SECOND_JUDGE = {"sentiment": "positive_rate[minilm]", "toxicity": "avg_max[bert-tiny]"}  # their metrics
OTHER_PERPLEXITY = "other_perplexity"  # of kept texts under another language model
COSTS, COST_ROWS = "costs.json", 8  # the time per token of every method, and the number of texts at once


@dataclass(frozen=True)
class KeptCell:
    """A cell of a sweep: its settings, the sums of its metrics over all prompts, and a text for each, or a blank."""

    name: str
    settings: dict[str, Any]
    sums: dict[str, Sums]
    texts: list[str]

    def value(self, metric: str) -> float:
        return self.sums[metric].value if metric in self.sums else NAN

    def take(self, rows: np.ndarray) -> "KeptCell":
        """The same of some prompts."""
        cut = {key: replace(one, totals=one.totals[rows], weights=one.weights[rows]) for key, one in self.sums.items()}
        return replace(self, sums=cut, texts=[self.texts[row] for row in rows])


@dataclass(frozen=True)
class KeptPrompts:
    digests: list[str]
    groups: np.ndarray  # the class of each

    def rows(self, group: str) -> np.ndarray:
        return np.flatnonzero(self.groups == group)


# --- writing ---


def keep_run(task: str, method: str) -> None:
    """Keep the numbers and some texts of a sweep that was measured."""
    run = Path(f"contest/{task}-{method}")
    sweep = load_sweep(run / "config.yaml")
    prompts = sweep.read_prompts()
    kept = KeptPrompts([digest(one.text) for one in prompts], np.array([one.group for one in prompts]))
    with_text = {int(row) for group in set(kept.groups) for row in kept.rows(group)[:KEPT_TEXTS]}
    write_prompts(Path(), task, kept)
    cells = read_measured_cells(run, sweep, prompts)
    write_kept(Path(), task, method, [summarise(sweep, cell, with_text) for cell in cells])


def summarise(sweep: Sweep, one: MeasuredCell, with_text: set[int]) -> KeptCell:
    """The settings of a cell, the sums of all its metrics, by metric or metric[judge], and its first samples."""
    sums = {}
    for key in [*list_judged(sweep.judges), *dict.fromkeys([*sweep.metrics, *one.known_ends])]:
        metric, judge = metric_and_judge(key)
        if METRICS[metric].compute is not None:
            sums[key] = METRICS[metric].sums(one.scored_by(judge))
    settings = {name: value for name, value in asdict(one.cell).items() if name in SETTINGS}
    texts = [samples[0] if row in with_text else "" for row, samples in enumerate(one.texts)]
    return KeptCell(one.cell.name, settings, sums, texts)


def write_kept(folder: Path, task: str, method: str, cells: list[KeptCell]) -> None:
    file = folder / "kept" / f"{task}-{method}.npz"
    rows = ({"cell": cell.name, **cell.settings, "texts": cell.texts} for cell in cells)
    _write_lines(file.with_suffix(".jsonl.xz"), rows)
    sums = {f"{cell.name}/{metric}": sums for cell in cells for metric, sums in cell.sums.items()}
    # Written last: where it is, the texts are, too.
    _write_arrays(file, {key: shorten(np.stack([one.totals, one.weights])) for key, one in sums.items()})


def _write_arrays(file: Path, arrays: dict[str, Any]) -> None:
    with atomic_file(file) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **arrays)


def shorten(values: np.ndarray) -> np.ndarray:
    """Round to 16 binary digits, about five decimal ones: such numbers take a fifth less space when compressed."""
    fractions, exponents = np.frexp(values)
    return np.ldexp(np.round(fractions * 2**16) / 2**16, exponents).astype(np.float32)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_prompts(folder: Path, task: str, prompts: KeptPrompts) -> None:
    rows = [{"prompt": d, "group": str(group)} for d, group in zip(prompts.digests, prompts.groups, strict=True)]
    _write_lines(folder / "kept" / "prompts" / f"{task}.jsonl.xz", rows)


def _write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as temporary, lzma.open(temporary, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# --- reading ---


def read_kept(folder: Path, task: str, method: str) -> list[KeptCell]:
    """The cells of a method; none where it was not run."""
    file = folder / "kept" / f"{task}-{method}.npz"
    sums: dict[str, dict[str, Sums]] = {}
    for key, (totals, weights) in read_arrays(file).items():
        cell, _, metric = key.rpartition("/")
        sums.setdefault(cell, {})[metric] = Sums(totals, weights, exponential=metric in EXPONENTIAL)
    return [
        KeptCell(row["cell"], {name: row[name] for name in SETTINGS}, sums[row["cell"]], row["texts"])
        for row in _read_lines(file.with_suffix(".jsonl.xz"))
        if sums
    ]


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a file; none where it is not there."""
    if not file.exists():
        return {}
    with np.load(file, allow_pickle=False) as arrays:
        return {key: arrays[key].astype(np.float64) for key in arrays}


def read_kept_prompts(folder: Path, task: str) -> KeptPrompts:
    """The prompts of a task; none where no method was run."""
    rows = _read_lines(folder / "kept" / "prompts" / f"{task}.jsonl.xz")
    return KeptPrompts([row["prompt"] for row in rows], np.array([row["group"] for row in rows]))


def find_prompts(folder: Path, task: Task) -> list[str]:
    """The texts of a task's prompts, in the order of the kept numbers; they lie in data/."""
    files = [file for name in task.groups.values() if (file := folder / "data" / f"{name}.jsonl").exists()]
    texts = {digest(prompt.text): prompt.text for file in files for prompt in read_prompts(file)}
    wanted = read_kept_prompts(folder, task.name).digests
    if missing := sum(one not in texts for one in wanted):
        names = " and ".join(f"data/{name}.jsonl" for name in task.groups.values())
        sys.exit(f"error: {missing} of {len(wanted)} prompts are not in {names}; write these by run.py prepare.")
    return [texts[one] for one in wanted]


def _read_lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    with lzma.open(file, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


# --- places ---


@dataclass(frozen=True)
class Place:
    """What was measured of a task on one class of prompts."""

    base_model: BaseModel
    task: Task
    group: str
    cells: Mapping[str, Sequence[KeptCell]]  # by method; a method that was not run has none
    chosen: Mapping[str, Mapping[str, Any]]  # settings by method; empty for a method that had nothing to choose
    mauve: Mapping[tuple[str, str], float]  # by method and cell
    costs: Mapping[str, float]  # time per token by method, as multiples of no guide

    @property
    def base(self) -> KeptCell | None:
        """The unguided base model that all others are compared with."""
        return next((cell for cell in self.cells[BASE] if cell.settings["seed"] == 0), None)

    def ratio(self, cell: KeptCell) -> float:
        """Perplexity as a multiple of the unguided one."""
        return NAN if self.base is None else cell.value("perplexity") / self.base.value("perplexity")

    def guided(self, method: str) -> list[KeptCell]:
        return [cell for cell in self.cells[method] if cell.settings["guide"] != UNGUIDED]

    def curve(self, method: str) -> list[KeptCell]:
        """The cells of a method, and of the unguided base model where β = 0 means the same."""
        return self.guided(method) if self.chosen[method].get("filter_p") else list(self.cells[method])

    def at_ratio(self, method: str, metric: str, ratio: float) -> float:
        """A metric of a curve where perplexity is a multiple of the unguided one; NaN where it is not reached."""
        return attribute_at([(self.ratio(cell), cell.value(metric)) for cell in self.curve(method)], ratio)

    def unguided_spread(self) -> float:
        """How far apart the attributes of equal unguided cells are, at most: methods may be tested in several runs."""
        found: dict[tuple[Any, ...], list[float]] = {}
        for cell in (cell for cells in self.cells.values() for cell in cells if cell.settings["guide"] == UNGUIDED):
            settings = tuple(cell.settings[name] for name in ("top_k", "top_p", "seed"))
            found.setdefault(settings, []).append(cell.value(self.task.metric))
        return max((max(values) - min(values) for values in found.values()), default=0.0)

    def shown(self, method: str) -> KeptCell | None:
        """The cell that stands for a method where a single one must.

        Its perplexity is the nearest to that at which settings were chosen, or its attribute the best without a β.
        """
        if method == BASE:
            return self.base
        if METHODS[method].has_curve:
            return min(self.guided(method), key=lambda cell: abs(np.log(self.ratio(cell) / TARGET)), default=None)
        return max(self.guided(method), key=lambda cell: self.task.side * cell.value(self.task.metric), default=None)

    def compared(self, method: str) -> list[KeptCell]:
        """The guided cells of a method, or its best one where it has no β."""
        if METHODS[method].has_curve:
            return self.guided(method)
        best = self.shown(method)
        return [] if best is None else [best]


def points(cells: Sequence[KeptCell], axis: str, metric: str) -> list[Point]:
    return [(cell.sums[axis], cell.sums[metric]) for cell in cells if metric in cell.sums and axis in cell.sums]


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
            near = {(m, cell): value for (t, m, cell, g), value in mauve.items() if (t, g) == (task.name, group)}
            rows = prompts.rows(group)
            here = {method: [cell.take(rows) for cell in found] for method, found in cells.items()}
            places.append(Place(base_model, task, group, here, chosen, near, costs))
    return places


def _read_cells(folder: Path, task: Task, method: str) -> list[KeptCell]:
    """The cells of a method, with the sums of the second judge and of another perplexity, where they were measured."""
    cells = read_kept(folder, task.name, method)
    scores = read_arrays(second_file(folder, task.name, method))
    likelihoods = read_arrays(second_file(folder, f"likelihood-{task.name}", method))
    for cell in cells:
        if scores:
            cell.sums[SECOND_JUDGE[task.name]] = positive_rate(scores[cell.name][:, None])
        if likelihoods:
            nll, tokens = likelihoods[cell.name][:, :, None]
            cell.sums[OTHER_PERPLEXITY] = corpus_perplexity(nll, tokens.astype(int))
    return cells


def second_file(folder: Path, task: str, method: str) -> Path:
    return folder / "second" / f"{task}-{method}.npz"


def read_mauve(folder: Path) -> dict[tuple[str, str, str, str], float]:
    """MAUVE by task, method, cell and class of prompts."""
    file = folder / "second" / "mauve.jsonl"
    rows = read_lines(file) if file.exists() else ()
    return {(row["task"], row["method"], row["cell"], row["group"]): row["value"] for row in rows}


def read_costs(folder: Path) -> dict[str, float]:
    """The median time per token of each method, as a multiple of no guide; empty where nothing was measured."""
    file = folder / COSTS
    found = json.loads(file.read_text())["over_unguided"] if file.exists() else {}
    return {method: ratio["median"] for method, ratio in found.items()}


# --- comparisons ---


@dataclass(frozen=True)
class Gain:
    """How much better our method is than another one at equal perplexity or KL; `reason` says why it is not known."""

    estimate: Estimate
    reason: str = ""

    @property
    def word(self) -> str:
        low, high = self.estimate.low, self.estimate.high
        return self.reason or ("better" if low > 0 else "worse" if high < 0 else "not told apart")


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
    theirs = points(place.compared(pair.other), across, metric)
    found, reason = [], NOT_RUN
    for training in pair.trainings:
        cells = place.curve(training) if len(theirs) == 1 else place.guided(training)
        ours = points(cells, across, metric)
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


# --- second opinions on kept texts ---

JUDGED, JUDGE, ENCODER = "sentiment", "models/judge-minilm", "minilm"
BATCH = 256  # texts whose likelihoods are measured together


def second(request: Request) -> None:
    """Judge the kept texts of sentiment by a judge over MiniLM, and compute MAUVE and another perplexity."""
    prompts = {name: find_prompts(Path(), task) for name, task in TASKS.items()}
    judge = train_judge()
    for method in METHODS:
        if request.wants(JUDGED, method):
            file = second_file(Path(), JUDGED, method)
            measure_cells(JUDGED, method, file, partial(judge_texts, judge, prompts[JUDGED]))
    compare_texts(request)
    if request.lm:
        measure_fluency(request, prompts)


def train_judge() -> Judge:
    """Train the judge, and measure it on texts that it has not seen, unless that is done."""
    command = [*RADQ, "judge", "train", "--data", f"data/judge-{JUDGED}.jsonl", "--labels", JUDGED]
    command += ["--encoder", ENCODER, "--out", JUDGE, "--overwrite", "--json"]
    run_all([Job("judge-minilm", command, f"{JUDGE}.json", keep=keep_json)], 1)
    judge = load_judge(f"linear:{JUDGE}", find_device("auto"))
    if not Path("second/judge.json").exists():
        rows, metrics = measure_judge(judge, JUDGED)
        write_json("second/judge.json", {"encoder": ENCODER, "unseen": rows, "metrics": metrics})
    return judge


def measure_judge(judge: Judge, attribute: str) -> tuple[int, dict[str, float | None]]:
    """The number of unseen texts, and how well the judge's scores agree with their labels."""
    rows = list(read_lines(Path(f"data/judge-{attribute}-unseen.jsonl")))
    labels = np.array([row[attribute] for row in rows], dtype=np.float64)
    found = measure_agreement(judge.score([row["text"] for row in rows]), labels)
    return len(rows), {"spearman": found.spearman, "auc": found.auc, "accuracy": found.accuracy}


def judge_texts(judge: Judge, prompts: list[str], texts: list[str]) -> np.ndarray:
    """The scores of texts; a blank one is read without its prompt."""
    return judge.score([prompt + text if text.strip() else text for prompt, text in zip(prompts, texts, strict=True)])


def measure_cells(task: str, method: str, file: Path, measure: Callable[[list[str]], np.ndarray]) -> None:
    """Write what is measured of the kept texts of each cell, unless the file is there or the method was not run."""
    if not file.exists() and (cells := read_kept(Path(), task, method)):
        _write_arrays(file, {cell.name: measure(cell.texts).astype(np.float32) for cell in cells})


def measure_fluency(request: Request, prompts: dict[str, list[str]]) -> None:
    """Write the likelihoods of the kept texts under another language model."""
    lm, tokenizer = load(request.lm, device=find_device("auto"))

    def measure(prompts: list[str], texts: list[str]) -> np.ndarray:
        found = measure_likelihoods(lm, tokenizer, prompts, texts, batch_size=BATCH, progress=True)
        return np.stack([found.nll, found.tokens])

    for task, method in product(TASKS, METHODS):
        if request.wants(task, method):
            file = second_file(Path(), f"likelihood-{task}", method)
            measure_cells(task, method, file, partial(measure, prompts[task]))


def compare_texts(request: Request) -> None:
    """Append the missing lines of mauve.jsonl: MAUVE of the cells that stand for methods, against the second seed of
    the unguided base model. The line of the unguided base model itself is the value that chance alone leaves."""
    encoder = load_encoder(ENCODER, find_device("auto"))

    def encode(cell: KeptCell) -> np.ndarray:
        texts = list(filter(str.strip, cell.texts))
        if len(texts) < MAUVE_MIN_SAMPLES:
            sys.exit(f"error: {cell.name} has {len(texts)} texts, and MAUVE needs {MAUVE_MIN_SAMPLES}.")
        return encoder.encode(texts)

    for place in read_places(Path()):
        reference = next((cell for cell in place.cells[BASE] if cell.settings["seed"] == 1), None)
        wanted = {name: place.shown(name) for name in METHODS if request.wants(place.task.name, name)}
        missing = {name: cell for name, cell in wanted.items() if cell and (name, cell.name) not in place.mauve}
        if reference is None or not missing:
            continue
        against = encode(reference)
        for name, cell in missing.items():
            row = {"task": place.task.name, "method": name, "cell": cell.name, "group": place.group}
            append(Path("second/mauve.jsonl"), row | {"value": mauve(encode(cell), against)})


def append(file: Path, row: dict[str, Any]) -> None:
    with file.open("ab") as stream:
        append_lines(stream, [row])


if __name__ == "__main__":
    keep_run(*sys.argv[1:])
