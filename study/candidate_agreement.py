"""Does agreement about candidates foretell how well a student steers, better than accuracy on texts does?

    python study/candidate_agreement.py --data sentiment.jsonl --eval-data sst2-dev.jsonl \\
        --write write-sentiment.jsonl --prompts dev-neutral.jsonl --judge-data judge-sentiment.jsonl --out agreement

Students of one teacher, the embedded sentiment model, are trained in different ways. Each is measured on labelled texts
(accuracy, AUC), on the base model's candidates (correlation with the teacher and error, as `radq distill --base`
does), and by a sweep (the share of positive texts at TARGET times the unguided perplexity, by a judge over MiniLM,
which shares nothing with the base model). OUT/agreement.jsonl has a line per student and a last one with Spearman's
rank correlations over students. Students and cells that are done are not repeated. See docs/distillation.md.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
import yaml
from models import RADQ, Job, run_all, write_json
from torch import Tensor

import radq
from radq.evaluation.estimates import Bootstrap, Sums
from radq.evaluation.metrics import METRICS
from radq.evaluation.sweep.config import UNGUIDED, load_sweep
from radq.evaluation.sweep.measure import MeasuredCell, read_measured_cells
from radq.files import atomic_file, read_lines
from radq.judges.agreement import rank_correlation
from radq.training.candidate_agreement import UNUSED, compare_rewards
from radq.training.candidates import CandidateSet

TEACHER, BASE, LABEL = "embedded:sentiment", "embedded", "sentiment"
TARGET = 1.15  # times the unguided perplexity, where students are compared
TEACHER_BETAS = (30, 70)  # a student whose rewards are spread half as wide has twice these
MOST_WORDS = 24  # of a training text: SST-2's phrases, not whole reviews
BOOTSTRAP = Bootstrap()


@dataclass(frozen=True)
class Student:
    """What a student learns from, and how its options differ from those of all students."""

    learns: Literal["candidates", "texts", "labels"]  # the teacher's rewards of both, of texts alone, or none
    options: str = ""


STUDENTS = {
    "candidates": Student("candidates"),
    "few steps": Student("candidates", "--max-steps 15"),
    "more steps": Student("candidates", "--max-steps 160"),
    "high rate": Student("candidates", "--learning-rate 5e-3"),
    "no differences": Student("candidates", "--difference-weight 0"),
    "no differences (more steps)": Student("candidates", "--difference-weight 0 --max-steps 160"),
    "texts": Student("texts"),
    "texts (more steps)": Student("texts", "--max-steps 160"),
    "texts (many steps)": Student("texts", "--max-steps 500"),
    "labels": Student("labels", "--max-steps 200"),
    "labels (few steps)": Student("labels"),
    "labels (many steps)": Student("labels", "--max-steps 800"),
}


@dataclass
class Arguments:
    data: str
    """Table with the columns text and sentiment, from which short texts are taken to train on."""
    eval_data: str
    """Table of the same columns, on which accuracy and AUC are measured."""
    write: str
    """Prompts after which the base model writes the prefixes that students learn candidates from."""
    prompts: str
    """Prompts of the sweep, which no training has seen."""
    judge_data: str
    """Table of the same columns, from which the judge learns."""
    out: str
    """Folder to work in."""
    num_texts: int = 800
    """Number of texts to train on."""
    num_held_out: int = 500
    """Largest number of texts for accuracy and AUC."""
    num_prefixes: int = 200
    """Number of prefixes to train on."""
    max_steps: int = 40
    """Number of steps of students that say nothing else."""
    num_prompts: int = 60
    """Number of prompts of the sweep."""
    samples: int = 2
    """Number of samples for each prompt."""
    judge_rows: int = 3000
    """Number of rows that the judge learns from."""
    metric: str = "positive_rate"
    """Metric of the judge's scores: positive_rate or mean_score."""


def main(arguments: Arguments) -> None:
    for name in ("data", "eval_data", "write", "prompts", "judge_data"):
        setattr(arguments, name, str(Path(getattr(arguments, name)).resolve()))
    Path(arguments.out, "students").mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.out)
    write_texts(arguments.data, Path("texts.jsonl"), arguments.num_texts)
    write_texts(arguments.eval_data, Path("held-out.jsonl"), arguments.num_held_out)
    run_all([judge_job(arguments), *(student_job(name, arguments) for name in STUDENTS)], at_once=1)
    agreements = measure_students()
    run_all([sweep_job(agreements, arguments)], at_once=1)
    report(agreements, read_curves(arguments.metric))


def folder_of(student: str) -> Path:
    return Path("students", re.sub(r"\W+", "-", student).strip("-"))


# --- training ---


def write_texts(source: str, file: Path, number: int) -> None:
    """Write the first short texts of a table to a file of their own."""
    if not file.exists():
        short = (row for row in read_lines(Path(source)) if 3 <= len(row["text"].split()) <= MOST_WORDS)
        with atomic_file(file) as temporary, temporary.open("w") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in islice(short, number))


def judge_job(arguments: Arguments) -> Job:
    command = [*RADQ, "judge", "train", "--data", arguments.judge_data, "--labels", LABEL, "--encoder", "minilm"]
    return Job("judge", [*command, "--limit", str(arguments.judge_rows), "--out", "judge"], "judge/judge.json")


def student_job(name: str, arguments: Arguments) -> Job:
    """A command that trains a student, with `radq train` for one without a teacher."""
    student, folder = STUDENTS[name], folder_of(name)
    texts = f"--data texts.jsonl --eval-data held-out.jsonl --labels {LABEL} --max-length 32 --batch-size 16"
    readout = f"--backbone {BASE} --reads base --learning-rate 1e-3 --cache cache --cache-states --eval-steps 100000"
    teacher = f"--teacher {TEACHER} --cache-targets"
    prefixes = f"--base {BASE} --num-prefixes {arguments.num_prefixes} --prefix-tokens 16 --prefix-positions 4"
    command = [*RADQ, "train" if student.learns == "labels" else "distill", "--out", str(folder), "--overwrite"]
    command += f"{texts} {readout} --max-steps {arguments.max_steps}".split()
    if student.learns != "labels":
        command += teacher.split()
    if student.learns == "candidates":
        command += [*f"{prefixes} --candidate-share 0.34".split(), "--prompts", arguments.write]
    command += student.options.split()
    return Job(folder.name, command, f"{folder}/results.json", prepare=lambda: share_candidates(folder))


def share_candidates(student: Path) -> None:
    """Give a later student what the teacher has told the first one about candidates and texts.

    Training overwrites the settings that make the folder a run; what is behind a link stays.
    """
    first = folder_of(next(iter(STUDENTS)))
    if student != first and not student.exists():
        student.mkdir()
        shutil.copy(first / "config.yaml", student)
        for folder in ("candidates", "targets"):
            (student / folder).symlink_to(Path("..", first.name, folder))


# --- agreement ---


def measure_students() -> dict[str, dict[str, float]]:
    """Accuracy and AUC on texts, as training has measured them, and the agreement with the teacher on candidates."""
    file = Path("students.json")
    if not file.exists():
        held_out = read_held_out()
        batches = [held_out.batch(range(n, min(n + 50, len(held_out)))) for n in range(0, len(held_out), 50)]
        lm, _ = radq.load(BASE)
        models = {name: radq.RewardModel.from_pretrained(str(folder_of(name)), lm=lm).eval() for name in STUDENTS}
        first = next(iter(models.values()))  # all students read the same layers
        states = [first.base_states(batch["prefix_ids"], batch["prefix_mask"]) for batch in batches]
        found = {name: measure_student(name, model, held_out, batches, states) for name, model in models.items()}
        write_json(file, found)
    return json.loads(file.read_text())


def measure_student(
    name: str, model: radq.RewardModel, held_out: CandidateSet, batches: list[dict[str, Tensor]], states: list[Tensor]
) -> dict[str, float]:
    k = held_out.candidates.shape[2]
    used = held_out.candidates.reshape(-1, k) != UNUSED
    rewards = np.concatenate([score_candidates(model, *both) for both in zip(batches, states, strict=True)])
    rewards, targets = rewards.reshape(-1, k, 1), held_out.targets.reshape(-1, k, 1)
    ended = json.loads((folder_of(name) / "results.json").read_text())
    found, reverse = compare_rewards(rewards, targets, used), compare_rewards(targets, rewards, used)
    return {
        "accuracy": ended[f"eval_accuracy_{LABEL}"],
        "auc": ended[f"eval_auc_{LABEL}"],
        "candidate_correlation": found.correlation[0],
        "candidate_error": found.error[0],
        "spread": reverse.constant_error[0],  # of the student's own rewards within a row of candidates
        "teacher_spread": found.constant_error[0],
    }


def read_held_out() -> CandidateSet:
    """The held-out candidates, with the teacher's rewards of them."""
    files = sorted(folder_of(next(iter(STUDENTS))).glob("candidates/*-held-out-*.npz"))
    return CandidateSet.join([CandidateSet(**dict(np.load(file))) for file in files])


@torch.no_grad()
def score_candidates(model: radq.RewardModel, batch: dict[str, Tensor], states: Tensor) -> np.ndarray:
    """The student's rewards of candidates, (b, p, k, 1)."""
    found = model(
        input_ids=batch["prefix_ids"],
        attention_mask=batch["prefix_mask"],
        positions=batch["positions"],
        candidates=batch["candidates"],
        states=states,
    )
    return model.link(found.candidates).numpy()


# --- steering ---


def sweep_job(agreements: Mapping[str, Mapping[str, float]], arguments: Arguments) -> Job:
    """One sweep of all students. Each β is one for the teacher, times the ratio of the spreads of their rewards."""
    widths = {name: one["teacher_spread"] / one["spread"] for name, one in agreements.items()}
    settings = {
        "base": BASE,
        "prompts": [{"file": arguments.prompts, "limit": arguments.num_prompts}],
        "guides": {
            name: {
                "folder": str(folder_of(name)),
                "weights": {LABEL: 1},
                "beta": [float(f"{beta * width:.3g}") for beta in TEACHER_BETAS],
            }
            for name, width in widths.items()
        },
        "judges": {"minilm": {"judge": "linear:judge", "reads": "text", "metrics": ["positive_rate", "mean_score"]}},
        "perplexity": "base",
        "metrics": ["perplexity"],
        "samples": arguments.samples,
        "batch_size": 64,
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    command = [*RADQ, "eval", "--config", "sweep.yaml", "--out", "sweep"]
    return Job("sweep", command, "sweep/differences.jsonl")


@dataclass(frozen=True)
class Curve:
    """A guide at several β, the unguided base model first: perplexities as ratios to it, and the attribute."""

    betas: list[float]
    ratios: np.ndarray  # (1 + r, c): of all prompts, and of r resamples
    values: np.ndarray  # (1 + r, c)

    def at_target(self) -> np.ndarray:
        """The attribute at TARGET, by straight lines over log perplexity; NaN where a curve does not reach it."""
        return np.array([_interpolate(x, y) for x, y in zip(np.log(self.ratios), self.values, strict=True)])


def _interpolate(places: np.ndarray, values: np.ndarray) -> float:
    order = places.argsort()
    return float(np.interp(np.log(TARGET), places[order], values[order], left=np.nan, right=np.nan))


def read_curves(metric: str) -> dict[str, Curve]:
    """The curves of all guides of the sweep; every guide has the same resamples of the prompts."""
    sweep = load_sweep(Path("sweep/config.yaml"))
    cells = read_measured_cells(Path("sweep"), sweep, sweep.read_prompts())
    unguided = [one for one in cells if one.cell.guide == UNGUIDED]
    curves = {}
    for name in sweep.guides:
        own = [*unguided, *(one for one in cells if one.cell.guide == name)]
        perplexities, values = (np.stack(list(columns), 1) for columns in zip(*_resampled(own, metric), strict=True))
        betas = [one.cell.beta or 0.0 for one in own]
        curves[name] = Curve(betas, perplexities / perplexities[:, :1], values)
    return curves


def _resampled(cells: list[MeasuredCell], metric: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Perplexity and attribute of each cell: of all prompts, and of each resample, (1 + r,)."""
    for cell in cells:
        texts = cell.scored_by("minilm")
        both: list[Sums] = [METRICS[name].sums(texts) for name in ("perplexity", metric)]
        columns = np.stack([column for sums in both for column in (sums.totals, sums.weights)], 1)
        drawn = np.concatenate([columns.sum(0, keepdims=True), BOOTSTRAP.sums(columns)])
        yield both[0].divide(*drawn[:, :2].T), both[1].divide(*drawn[:, 2:].T)


# --- the result ---


def report(agreements: Mapping[str, Mapping[str, float]], curves: Mapping[str, Curve]) -> None:
    """Print and write all numbers of each guide, and the rank correlations over students."""
    rows: list[dict[str, Any]] = [describe(name, agreements[name], curve) for name, curve in curves.items()]
    steering = np.stack([curves[name].at_target() for name in agreements], 1)  # (1 + r, students)
    found = {}
    for name in ("candidate_correlation", "candidate_error", "accuracy", "auc"):
        measured = np.array([one[name] for one in agreements.values()])
        each = [rank_correlation(row, measured) if np.isfinite(row).all() else np.nan for row in steering]
        found[name] = np.array(each, float)  # (1 + r,)
    ranks = {name: with_interval(each) for name, each in found.items()}
    gains = {name: with_interval(found["candidate_correlation"] - found[name]) for name in ("accuracy", "auc")}
    rows.append({"students": len(agreements), "rank_correlation_with_steering": ranks, "agreement_minus": gains})
    with atomic_file(Path("agreement.jsonl")) as temporary:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(*(json.dumps(row, ensure_ascii=False) for row in rows), sep="\n")


def with_interval(values: np.ndarray) -> list[float]:
    """The number of all prompts, and the ends of the interval of its resamples, (1 + r,)."""
    return [round(float(value), 3) for value in (values[0], *BOOTSTRAP.interval(values[1:]))]


def describe(name: str, agreement: Mapping[str, float], curve: Curve) -> dict[str, Any]:
    steering = curve.at_target()
    return {
        "student": name,
        "learns": STUDENTS[name].learns,
        "options": STUDENTS[name].options,
        **{key: round(value, 4) for key, value in agreement.items()},
        "steering": [round(float(value), 4) for value in (steering[0], *BOOTSTRAP.interval(steering[1:]))],
        "curve": [
            [beta, round(float(ratio), 4), round(float(value), 4)]
            for beta, ratio, value in zip(curve.betas, curve.ratios[0], curve.values[0], strict=True)
        ],
    }


if __name__ == "__main__":
    main(tyro.cli(Arguments))
