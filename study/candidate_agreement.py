"""Does agreement about candidates foretell how well a student steers, better than accuracy on texts does?

Students of one teacher, the embedded sentiment model, are trained in different ways. Each is measured on labelled texts
(accuracy, AUC), on the base model's candidates (correlation with the teacher and error, as `radq distill --base`
does), and by a sweep (the share of positive texts at TARGET times the unguided perplexity, by a judge over MiniLM,
which shares nothing with the base model). agreement.jsonl has a line per student and a last one with Spearman's
rank correlations over students. Students and cells that are done are not repeated. See docs/distillation.md.
"""

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from contest import Request
from models import RADQ, Job, run_all, write_json, write_lines

import radq
from radq.evaluation.estimates import Bootstrap
from radq.evaluation.metrics import METRICS
from radq.evaluation.sweep.config import UNGUIDED, load_sweep
from radq.evaluation.sweep.measure import MeasuredCell, read_measured_cells
from radq.files import read_lines
from radq.judges.agreement import rank_correlation
from radq.training.candidate_agreement import UNUSED, MarkedPrefix, compare_rewards, score_places
from radq.training.candidates import CandidateSet
from radq.training.teacher import RewardSource, Teacher

TEACHER, BASE, LABEL = "embedded:sentiment", "embedded", "sentiment"
TARGET = 1.15  # times the unguided perplexity, where students are compared
TEACHER_BETAS = (30, 70)  # a student whose rewards are spread half as wide has twice these
MOST_WORDS = 24  # of a training text: SST-2's phrases, not whole reviews
NUM_TEXTS, NUM_HELD_OUT = 800, 500  # to train on, and at most for accuracy and AUC
NUM_PROMPTS, SAMPLES = 150, 4  # of the sweep
METRIC = "positive_rate"  # of the judge's scores; mean_score is measured, too
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
OPTIONS = (
    f"--data texts.jsonl --eval-data held-out.jsonl --labels {LABEL} --max-length 32 --batch-size 16 --backbone {BASE} "
    "--reads base --learning-rate 1e-3 --cache cache --cache-states --eval-steps 100000 --max-steps 40"
)
TEACHING = f"--teacher {TEACHER} --cache-targets"
CANDIDATES = (
    f"--base {BASE} --num-prefixes 200 --prefix-tokens 16 --prefix-positions 4 --candidate-share 0.34 "
    "--prompts ../data/write-sentiment.jsonl"
)
JUDGE = "--data ../data/judge-sentiment.jsonl --labels sentiment --encoder minilm --limit 3000 --out judge"


def agreement(request: Request) -> None:
    """Train students in different ways, and tell what foretells how well they steer."""
    Path("agreement/students").mkdir(parents=True, exist_ok=True)
    with chdir("agreement"):
        write_texts("sentiment", Path("texts.jsonl"), NUM_TEXTS)
        write_texts("sst2-dev", Path("held-out.jsonl"), NUM_HELD_OUT)
        judge = Job("judge", [*RADQ, "judge", "train", *JUDGE.split()], "judge/judge.json")
        run_all([judge, *map(student_job, STUDENTS)], 1)
        agreements = measure_students()
        run_all([sweep_job(agreements)], 1)
        report(agreements, read_curves())


def folder_of(student: str) -> Path:
    return Path("students", re.sub(r"\W+", "-", student).strip("-"))


# --- training ---


def write_texts(source: str, file: Path, number: int) -> None:
    """Write the first short texts of a table to a file of their own."""
    if not file.exists():
        rows = read_lines(Path(f"../data/{source}.jsonl"))
        write_lines(file, islice((row for row in rows if 3 <= len(row["text"].split()) <= MOST_WORDS), number))


def student_job(name: str) -> Job:
    student, folder = STUDENTS[name], folder_of(name)
    learns = {"labels": "", "texts": TEACHING, "candidates": f"{TEACHING} {CANDIDATES}"}[student.learns]
    command = [*RADQ, "distill" if learns else "train", "--out", str(folder), "--overwrite"]
    command += f"{OPTIONS} {learns} {student.options}".split()
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
        files = sorted(folder_of(next(iter(STUDENTS))).glob("candidates/*-held-out-*.npz"))
        held_out = CandidateSet.join([CandidateSet.load(one) for one in files])
        lm, _ = radq.load(BASE)
        models = {name: radq.RewardModel.from_pretrained(str(folder_of(name)), lm=lm).eval() for name in STUDENTS}
        write_json(file, {name: measure_student(name, model, held_out) for name, model in models.items()})
    return json.loads(file.read_text())


def measure_student(name: str, model: radq.RewardModel, held_out: CandidateSet) -> dict[str, float]:
    texts = zip(held_out.input_ids.tolist(), held_out.lengths, held_out.positions.tolist(), strict=True)
    prefixes = [MarkedPrefix(ids[:length], places) for ids, length, places in texts]
    k = held_out.candidates.shape[2]
    used = held_out.candidates.reshape(-1, k) != UNUSED
    rewards = score_places(Teacher([[RewardSource(model)]]), prefixes, held_out.candidates).reshape(-1, k, 1)
    targets = held_out.targets.reshape(-1, k, 1)
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


# --- steering ---


def sweep_job(agreements: Mapping[str, Mapping[str, float]]) -> Job:
    """One sweep of all students. Each β is one for the teacher, times the ratio of the spreads of their rewards."""
    widths = {name: one["teacher_spread"] / one["spread"] for name, one in agreements.items()}
    settings = {
        "base": BASE,
        "prompts": [{"file": "../data/dev-neutral.jsonl", "limit": NUM_PROMPTS}],
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
        "samples": SAMPLES,
        "batch_size": 64,
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return Job("sweep", [*RADQ, "eval", "--config", "sweep.yaml", "--out", "sweep"], "sweep/differences.jsonl")


@dataclass(frozen=True)
class Curve:
    """A guide at several β, the unguided base model first: perplexities as ratios to it, and the attribute."""

    betas: list[float]
    ratios: np.ndarray  # (c, 1 + r): of all prompts, and of r resamples
    values: np.ndarray  # (c, 1 + r)

    def at_target(self) -> np.ndarray:
        """The attribute at TARGET, by straight lines over log perplexity; NaN where a curve does not reach it."""
        curves = (
            np.array(sorted(zip(*both, strict=True))).T for both in zip(self.ratios.T, self.values.T, strict=True)
        )
        return np.array([np.interp(np.log(TARGET), np.log(x), y, left=np.nan, right=np.nan) for x, y in curves])


def read_curves() -> dict[str, Curve]:
    """The curves of all guides of the sweep; every guide has the same resamples of the prompts."""
    sweep = load_sweep(Path("sweep/config.yaml"))
    cells = read_measured_cells(Path("sweep"), sweep, sweep.read_prompts())
    curves = {}
    for name in sweep.guides:
        own = [one for guide in (UNGUIDED, name) for one in cells if one.cell.guide == guide]
        perplexities, values = np.stack([_resampled(one) for one in own], 1)
        curves[name] = Curve([one.cell.beta or 0.0 for one in own], perplexities / perplexities[0], values)
    return curves


def _resampled(cell: MeasuredCell) -> np.ndarray:
    """Perplexity and attribute, of all prompts and of each resample, (2, 1 + r)."""
    texts = cell.scored_by("minilm")
    both = [METRICS[name].sums(texts) for name in ("perplexity", METRIC)]
    return np.concatenate([[[sums.value] for sums in both], BOOTSTRAP.resample(*both)], 1)


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
    write_lines(Path("agreement.jsonl"), rows)
    print(Path("agreement.jsonl").read_text(), end="")


def with_interval(values: np.ndarray, digits: int = 3) -> list[float]:
    """The number of all prompts, and the ends of the interval of its resamples, (1 + r,)."""
    return [round(float(value), digits) for value in (values[0], *BOOTSTRAP.interval(values[1:]))]


def describe(name: str, agreement: Mapping[str, float], curve: Curve) -> dict[str, Any]:
    points = zip(curve.betas, curve.ratios[:, 0], curve.values[:, 0], strict=True)
    return {
        "student": name,
        **vars(STUDENTS[name]),
        **{key: round(value, 4) for key, value in agreement.items()},
        "steering": with_interval(curve.at_target(), 4),
        "curve": [[beta, round(float(ratio), 4), round(float(value), 4)] for beta, ratio, value in points],
    }
