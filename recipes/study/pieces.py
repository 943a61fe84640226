"""The study: the paper's claims on SmolLM2-135M, in pieces that a GPU does in minutes each. See README.md.

    python recipes/study/pieces.py train --folder runs/study      (then judges, sweeps, rank, time, expressivity, mauve)

Pieces are radq's own commands, several at once, in the study's folder. What is done already is not done again.
"""

import argparse
import json
import lzma
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from jobs import Job, run_all, shown, write

from radq.evaluation.judges.encoders import load_encoder
from radq.evaluation.judges.models import load_judge
from radq.evaluation.metrics import ScoredTexts, measure
from radq.files import read_lines
from radq.models.loading import find_device

RECIPES = Path(__file__).resolve().parent.parent
HERE = RECIPES / "study"
RADQ = [sys.executable, "-m", "radq"]
SWEEPS = ("sentiment", "detox")  # the longest first
EXCERPT, MAUVE_SAMPLES = 5, 2  # samples of each prompt
TASKS = {"toxicity": "data/toxicity.jsonl", "sentiment": "data/sentiment.jsonl"}


# --- models ---


def recipe(name: str, **changes: Any) -> dict[str, Any]:
    """A recipe of an embedded model, with changes; its data lies in the study's folder under the same name."""
    return yaml.safe_load((RECIPES / "embedded" / f"{name}.yaml").read_text()) | changes


def student(task: str, teacher: str = "v", **changes: Any) -> dict[str, Any]:
    return recipe(f"{task}-q", teacher=f"models/{task}-{teacher}", **changes)


def from_responses(task: str, **changes: Any) -> dict[str, Any]:
    return recipe(f"{task}-q", teacher="", **changes)


def judge(task: str, **settings: Any) -> dict[str, Any]:
    """RAD-V with the full backbone."""
    data = {"data": [f"data/judge-{task}.jsonl"], "eval_data": [f"data/judge-{task}-unseen.jsonl"], "labels": task}
    return data | {"backbone": "embedded", "kind": "v", "warmup_steps": 50, "max_length": 96} | settings


def experts(task: str, method: str) -> dict[str, Any]:
    """With the full backbone: rivals lack nothing."""
    return {
        "data": [TASKS[task]],
        "labels": task,
        "method": method,
        "backbone": "embedded",
        "max_length": 96,
        "batch_size": 64,
        "max_steps": 500,
        "learning_rate": 2e-5,
        "warmup_steps": 50,
    }


MODELS = {  # teachers first
    "toxicity-v": recipe("toxicity-v"),
    "sentiment-v": recipe("sentiment-v"),
    "judge-toxicity": judge("toxicity", batch_size=32, learning_rate=5e-5, epochs=4),
    "judge-sentiment": judge("sentiment", batch_size=128, learning_rate=5e-5, epochs=2),
    "toxicity-q-responses": from_responses("toxicity"),
    "sentiment-q-responses": from_responses("sentiment"),
    "toxicity-q-cross-entropy": from_responses("toxicity", loss="ce"),
    "toxicity-q-mlp": from_responses("toxicity", head="mlp"),
    "toxicity-dexperts": experts("toxicity", "dexperts"),
    "sentiment-dexperts": experts("sentiment", "dexperts"),
    "toxicity-v-again": recipe("toxicity-v", seed=1),  # how far another run is from the first
    "sentiment-v-again": recipe("sentiment-v", seed=1),
    "toxicity-q": student("toxicity"),
    "sentiment-q": student("sentiment"),
    "toxicity-q-no-regulariser": student("toxicity", reg_weight=0.0),
    "toxicity-q-no-baseline": student("toxicity", reg_weight=0.0, head="linear-nobaseline"),
    "toxicity-gedi": experts("toxicity", "gedi"),
    "sentiment-gedi": experts("sentiment", "gedi"),
    "toxicity-q-again": student("toxicity", "v-again", seed=1),
    "sentiment-q-again": student("sentiment", "v-again", seed=1),
}


def training_job(name: str, settings: dict[str, Any]) -> Job:
    """One that was stopped goes on from its last checkpoint."""
    config, text = Path(f"models/{name}.yaml"), yaml.safe_dump(settings | {"out": f"models/{name}"}, sort_keys=False)
    began = config.exists() and config.read_text() == text and Path(f"models/{name}/config.yaml").exists()
    config.write_text(text)
    command = "train-experts" if "method" in settings else "distill" if settings.get("teacher") else "train"
    options = ["--config", str(config), "--resume" if began else "--overwrite", "--json"]
    needs = f"{settings['teacher']}.json" if settings.get("teacher") else ""
    return Job(name, [*RADQ, command, *options], f"models/{name}.json", needs)


def describe_model(job: Job, output: str, seconds: float) -> None:
    """models/NAME.json, for the page of results."""
    printed = json.loads(output[output.index("{") :])
    metrics = {name.replace("eval_", ""): printed[name] for name in printed if "eval_" in name}
    metrics = {name: metrics[name] for name in metrics if not name.endswith(("loss", "runtime", "per_second"))}
    write(job.makes, {"command": shown(job.command), "seconds": round(seconds, 1), "metrics": metrics})


def train(jobs: int) -> None:
    Path("models").mkdir(exist_ok=True)
    run_all([training_job(name, settings) for name, settings in MODELS.items()], jobs, describe_model)


# --- how good the judges are ---


def judges(jobs: int) -> None:
    """Rank correlation and AUC on texts that a judge has not seen."""
    from scipy.stats import spearmanr
    from sklearn.metrics import roc_auc_score

    kinds = {"toxicity": "reward:models/judge-toxicity", "sentiment": "reward:models/judge-sentiment"}
    kinds["bert-tiny"] = "onnx:toxicity-bert-tiny"
    for name, specification in kinds.items():
        if Path(f"judges/{name}.json").exists():
            continue
        task = "sentiment" if name == "sentiment" else "toxicity"
        rows = [json.loads(line) for line in Path(f"data/judge-{task}-unseen.jsonl").read_text().splitlines()]
        scores = load_judge(specification, find_device("auto")).score([row["text"] for row in rows])
        labels = np.array([row[task] for row in rows])
        metrics = {
            "spearman": float(spearmanr(scores, labels).statistic),
            "auc": float(roc_auc_score(labels > 0.5, scores)),
            "accuracy": float(((scores > 0.5) == (labels > 0.5)).mean()),
        }
        write(f"judges/{name}.json", {"judge": specification, "rows": {"unseen": len(rows)}, "metrics": metrics})


# --- sweeps, ranks, times ---


def sweeps(jobs: int) -> None:
    run_all(sweep_jobs(), jobs, keep_output)


def measure_stopped(jobs: int) -> None:
    """What is whole of sweeps that were stopped, where time has run out; `sweeps` still goes on with them."""
    began = [job for job in sweep_jobs() if Path(f"sweeps/{job.name}/generations.jsonl").exists()]
    stopped = [job for job in began if not Path(job.makes).exists()]
    parts = [replace(job, command=[*job.command, "--only-measure"], makes=f"{job.makes}.part") for job in stopped]
    for part in parts:
        Path(part.makes).unlink(missing_ok=True)
    run_all(parts, jobs, keep_output)


def sweep_jobs() -> list[Job]:
    """A run for each number of candidates: guides are compared at the same one, and runs stay short."""
    Path("sweeps").mkdir(exist_ok=True)
    settings = {name: yaml.safe_load((HERE / "sweeps" / f"{name}.yaml").read_text()) for name in SWEEPS}
    ks = sorted({k for sweep in settings.values() for k in sweep["top_k"]})
    return [sweep_job(name, settings[name], k) for k in ks for name in SWEEPS if k in settings[name]["top_k"]]


def sweep_job(name: str, settings: dict[str, Any], k: int) -> Job:
    run = f"sweeps/{name}-k{k}"
    Path(f"{run}.yaml").write_text(yaml.safe_dump(settings | {"top_k": k}, sort_keys=False))
    command = [*RADQ, "eval", "--config", f"{run}.yaml", "--out", run, "--cache", run, "--json"]
    return Job(Path(run).name, command, f"{run}.json")


def rank(jobs: int) -> None:
    """float32 by TF32 tensor cores: its noise is far below the cutoff, and RAD-V reads 50 million tokens."""
    models = [name for name in MODELS if ("-v" in name or "-q" in name) and not name.endswith("-again")]
    run_all([rank_job(name) for name in models], jobs, keep_output)


def rank_job(name: str) -> Job:
    data = TASKS[name.split("-")[0]]
    command = [*RADQ, "rank", "model", f"models/{name}", "--data", data, "--rows", "64,128,256,512,1024"]
    command += ["--batch-size", "256", "--json"]
    return Job(f"rank-{name}", command, f"rank/{name}.json", environment={"NVIDIA_TF32_OVERRIDE": "1"})


def keep_output(job: Job, output: str, seconds: float) -> None:
    write(job.makes, json.loads(output[output.index("{") :]))


def time_tokens(jobs: int) -> None:
    command = [sys.executable, str(RECIPES.parent / "benchmarks" / "candidates.py"), "--base", "embedded"]
    command += ["--rad-q", "models/toxicity-q", "--rad-v", "models/toxicity-v", "--batches", "25", "1000", "--json"]
    run_all([Job("time", command, "timing.json")], 1, keep_output)


def expressivity(jobs: int) -> None:
    def keep(job: Job, output: str, seconds: float) -> None:
        Path("expressivity").mkdir(exist_ok=True)
        Path(job.makes).write_text(output)

    script = [sys.executable, str(RECIPES / "expressivity.py"), "--device", "cuda", "--kind"]
    run_all([Job(f"expressivity-{kind}", [*script, kind], f"expressivity/{kind}.txt") for kind in "vq"], jobs, keep)


# --- MAUVE, which takes long: of some samples, where the package is ---


def excerpts(jobs: int) -> None:
    """The first samples of every prompt in measured cells: small files to look at, and to take to another machine."""
    for metrics in sorted(Path("sweeps").glob("*-k*/metrics.jsonl")):
        file = Path("excerpts") / f"{metrics.parent.name}.jsonl.xz"
        if file.exists() and file.stat().st_mtime > metrics.stat().st_mtime:
            continue
        measured = {row["cell"] for row in read_lines(metrics)}  # whole ones
        file.parent.mkdir(exist_ok=True)
        temporary = file.with_suffix(".tmp")
        with lzma.open(temporary, "wt", preset=1) as stream:
            for row in read_lines(metrics.with_name("generations.jsonl")):
                if row["cell"] not in measured:
                    break
                kept = {name: row[name] for name in ("cell", "prompt", "group")}
                stream.write(json.dumps(kept | {"continuations": row["continuations"][:EXCERPT]}) + "\n")
        temporary.replace(file)


def mauve(jobs: int) -> None:
    """Of each cell against the unguided texts of the same prompts; a process for each sweep and k."""
    Path("mauve.jsonl").touch()
    done = {(row["sweep"], row["cell"], row["group"]) for row in read_lines(Path("mauve.jsonl"))}
    files = sorted(Path("excerpts").glob("*.jsonl.xz"))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        list(pool.map(mauve_of_sweep, files, repeat(done)))


def mauve_of_sweep(file: Path, done: set[tuple[str, str, str]]) -> None:
    encoder = load_encoder("minilm", find_device("auto"))
    sweep, reference = file.name.removesuffix(".jsonl.xz"), {}
    for (cell, group), texts in read_excerpt(file).items():
        if group in reference and (sweep, cell, group) in done:
            continue
        features = encoder.encode([text for samples in texts for text in samples])
        features = features.reshape(len(texts), MAUVE_SAMPLES, -1)
        reference.setdefault(group, features)  # the unguided cell comes first
        if (sweep, cell, group) not in done:
            found = measure(["mauve"], ScoredTexts(texts, features=features, reference=reference[group]))["mauve"]
            row = {"sweep": sweep, "cell": cell, "group": group, "value": found.value}
            with Path("mauve.jsonl").open("a") as stream:
                stream.write(json.dumps(row | {"low": found.low, "high": found.high}) + "\n")


def read_excerpt(file: Path) -> dict[tuple[str, str], list[list[str]]]:
    texts: dict[tuple[str, str], list[list[str]]] = {}
    with lzma.open(file, "rt") as stream:
        for row in map(json.loads, stream):
            texts.setdefault((row["cell"], row["group"]), []).append(row["continuations"][:MAUVE_SAMPLES])
    return texts


PIECES = {
    "train": train,
    "judges": judges,
    "sweeps": sweeps,
    "measure": measure_stopped,
    "rank": rank,
    "time": time_tokens,
    "expressivity": expressivity,
    "excerpts": excerpts,
    "mauve": mauve,
}


# --- a piece ---


def record_piece(piece: str, seconds: float, commit: str) -> None:
    """A line of pieces.jsonl: what ran, where, for how long."""
    line = {
        "piece": piece,
        "command": f"python recipes/study/pieces.py {piece}",
        "commit": commit,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "seconds": round(seconds),
    }
    with Path("pieces.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def find_commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=RECIPES, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=PIECES)
    parser.add_argument("--folder", type=Path, required=True, help="of the study, with data/ as the README makes it")
    parser.add_argument("--jobs", type=int, default=4, help="commands at once; train wants to begin all teachers")
    parser.add_argument("--commit", default=find_commit(), help="of radq, where there is no git")
    arguments = parser.parse_args()
    os.chdir(arguments.folder)
    began = time.time()
    PIECES[arguments.piece](arguments.jobs)
    record_piece(arguments.piece, time.time() - began, arguments.commit)


if __name__ == "__main__":
    main()
