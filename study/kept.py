"""The numbers of the contest that are kept: small files, from which everything on the page can be computed again.

    python study/kept.py TASK METHOD        (in the study's folder, after the method's sweep)

kept/TASK-METHOD.npz         CELL/METRIC: the totals and weights of each prompt whose sums make a metric, (2, p) float32
kept/TASK-METHOD.jsonl.xz    a line per cell: its settings, and the first sample of 500 prompts of each class
kept/prompts/TASK.jsonl.xz   a line per prompt: a digest of its text, which belongs to another data set, and its class
"""

import hashlib
import json
import lzma
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from methods import Task

from radq.data.prompts import read_prompts
from radq.evaluation.estimates import Sums
from radq.evaluation.metrics import METRICS
from radq.evaluation.sweep.config import Sweep, load_sweep
from radq.evaluation.sweep.measure import MeasuredCell, read_measured_cells
from radq.files import whole_file
from radq.report.results import metric_and_judge

SETTINGS = ("guide", "beta", "top_k", "top_p", "seed", "best_of", "ask")
KEPT_TEXTS = 500  # of each class of prompts; the texts of others are blank
EXPONENTIAL = ("corpus_perplexity",)  # metrics that are exp of a ratio of sums


@dataclass(frozen=True)
class KeptCell:
    """A cell of a sweep: its settings, the sums of its metrics over all prompts, and a text for each, or a blank."""

    name: str
    settings: dict[str, Any]
    sums: dict[str, Sums]
    texts: list[str]

    def take(self, metric: str, rows: np.ndarray) -> Sums:
        """The sums of some prompts."""
        sums = self.sums[metric]
        return Sums(sums.totals[rows], sums.weights[rows], exponential=sums.exponential)


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
    cells = [summarise(sweep, cell, with_text) for cell in read_measured_cells(run, sweep, prompts)]
    write_prompts(Path(), task, kept)
    write_kept(Path(), task, method, cells)


def summarise(sweep: Sweep, one: MeasuredCell, with_text: set[int]) -> KeptCell:
    """The settings of a cell, the sums of all its metrics, by metric or metric[judge], and its first samples."""
    judged = [(f"{metric}[{judge}]", judge) for judge, use in sweep.judges.items() for metric in use.metrics]
    keys = [*judged, *((metric, None) for metric in dict.fromkeys([*sweep.metrics, *one.known_ends]))]
    metrics = {key: METRICS[metric_and_judge(key)[0]].sums for key, _ in keys}
    sums = {key: found(one.scored_by(judge)) for key, judge in keys if (found := metrics[key]) is not None}
    settings = {name: value for name, value in asdict(one.cell).items() if name in SETTINGS}
    texts = [samples[0] if row in with_text else "" for row, samples in enumerate(one.texts)]
    return KeptCell(one.cell.name, settings, sums, texts)


def write_kept(folder: Path, task: str, method: str, cells: list[KeptCell]) -> None:
    file = folder / "kept" / f"{task}-{method}.npz"
    rows = ({"cell": cell.name, **cell.settings, "texts": cell.texts} for cell in cells)
    _write_lines(file.with_suffix(".jsonl.xz"), rows)
    arrays: dict[str, Any] = {
        f"{cell.name}/{metric}": shorten(np.stack([sums.totals, sums.weights]))
        for cell in cells
        for metric, sums in cell.sums.items()
    }
    with whole_file(file) as temporary, temporary.open("wb") as stream:  # last: where it is, the texts are, too
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
    with whole_file(file) as temporary, lzma.open(temporary, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# --- reading ---


def read_kept(folder: Path, task: str, method: str) -> list[KeptCell]:
    """The cells of a method; none where it was not run."""
    file = folder / "kept" / f"{task}-{method}.npz"
    if not file.exists():
        return []
    sums: dict[str, dict[str, Sums]] = {}
    with np.load(file, allow_pickle=False) as arrays:
        for key in arrays:
            cell, _, metric = key.rpartition("/")
            totals, weights = arrays[key].astype(np.float64)
            sums.setdefault(cell, {})[metric] = Sums(totals, weights, exponential=metric in EXPONENTIAL)
    return [
        KeptCell(row["cell"], {name: row[name] for name in SETTINGS}, sums[row["cell"]], row["texts"])
        for row in _read_lines(file.with_suffix(".jsonl.xz"))
    ]


def read_kept_prompts(folder: Path, task: str) -> KeptPrompts:
    """The prompts of a task; none where no method was run."""
    file = folder / "kept" / "prompts" / f"{task}.jsonl.xz"
    rows = _read_lines(file) if file.exists() else []
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
    with lzma.open(file, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


if __name__ == "__main__":
    keep_run(*sys.argv[1:])
