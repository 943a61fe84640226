"""The study: the paper's claims on SmolLM2-135M, in pieces that take a GPU minutes each. See README.md.

    python study/run.py prepare RTP.jsonl.gz NEUTRAL.jsonl.gz NEGATIVE.jsonl.gz IMDB.jsonl.xz --folder STUDY
    python study/run.py train --folder STUDY      (then judges, sweeps, rank, time, expressivity, …)
    python study/run.py contest --folder STUDY    (then second: the contest)

Pieces run radq's own commands in the study's folder, several at once. Finished work is not repeated.
"""

import argparse
import json
import lzma
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from importlib.metadata import version
from itertools import islice, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from bases import BASES, CONVERTED, EMBEDDED
from costs import measure_costs
from jobs import RADQ, Job, keep_json, run_all, write_json
from pieces import CONTEST_PIECES, Request
from sklearn.metrics import roc_auc_score
from splits import prepare
from trainings import JUDGES, describe_model, training_job

from radq import RewardGuide, RewardModel, generate
from radq.errors import RadqError
from radq.evaluation.demonstration import ATTRIBUTES
from radq.evaluation.metrics import ScoredTexts, measure
from radq.files import read_lines, whole_file
from radq.judges.encoders import load_encoder
from radq.judges.models import load_judge
from radq.models.loading import find_device, load
from radq.sources.gguf import convert_gguf

HERE = Path(__file__).resolve().parent
EXPRESSIVITY = HERE.parent / "recipes" / "expressivity.py"
SWEEPS = ("sentiment", "detox")  # the longest first
DATA = {"toxicity": "data/toxicity.jsonl", "sentiment": "data/sentiment.jsonl"}
EXCERPT, MAUVE_SAMPLES = 5, 2  # samples of each prompt
SHOWN = (
    ("sentiment", "neutral", 2),
    ("sentiment", "negative", 2),
    ("toxicity", "rtp", 1),
)  # attribute, prompts, how many


# --- models ---


def recipe(name: str, **changes: Any) -> dict[str, Any]:
    """A recipe of the paper's models, with changes."""
    return yaml.safe_load((HERE / "paper" / f"{name}.yaml").read_text()) | changes


def student(attribute: str, teacher: str = "v", **changes: Any) -> dict[str, Any]:
    return recipe(f"{attribute}-q", teacher=f"models/{attribute}-{teacher}", **changes)


def from_labels(attribute: str, **changes: Any) -> dict[str, Any]:
    return recipe(f"{attribute}-q", teacher="", **changes)


def experts(attribute: str, method: str) -> dict[str, Any]:
    """The language models of a baseline, with the full backbone, so that baselines are no smaller than they can be."""
    return {
        "data": [DATA[attribute]],
        "labels": attribute,
        "method": method,
        "backbone": "embedded",
        "max_length": 96,
        "batch_size": 64,
        "max_steps": 500,
        "learning_rate": 2e-5,
        "warmup_steps": 50,
    }


MODELS = {  # teachers stand before their students
    "toxicity-v": recipe("toxicity-v"),
    "sentiment-v": recipe("sentiment-v"),
    **JUDGES,
    "toxicity-q-labels": from_labels("toxicity"),
    "sentiment-q-labels": from_labels("sentiment"),
    "toxicity-q-cross-entropy": from_labels("toxicity", loss="ce"),
    "toxicity-q-mlp": from_labels("toxicity", head="mlp"),
    "toxicity-dexperts": experts("toxicity", "dexperts"),
    "sentiment-dexperts": experts("sentiment", "dexperts"),
    "toxicity-v-again": recipe("toxicity-v", seed=1),  # shows how far apart two trainings are
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


def train(jobs: int) -> None:
    Path("models").mkdir(exist_ok=True)
    run_all([training_job(name, settings) for name, settings in MODELS.items()], jobs, describe_model)


def judges(jobs: int) -> None:
    """Rank correlation, AUC and accuracy of each judge on texts that it has not seen."""
    from scipy.stats import spearmanr

    kinds = {"toxicity": "reward:models/judge-toxicity", "sentiment": "reward:models/judge-sentiment"}
    kinds["bert-tiny"] = "onnx:toxicity-bert-tiny"
    for name, specification in kinds.items():
        if Path(f"judges/{name}.json").exists():
            continue
        attribute = "sentiment" if name == "sentiment" else "toxicity"
        rows = list(read_lines(Path(f"data/judge-{attribute}-unseen.jsonl")))
        scores = load_judge(specification, find_device("auto")).score([row["text"] for row in rows])
        labels = np.array([row[attribute] for row in rows])
        metrics = {
            "spearman": float(spearmanr(scores, labels).statistic),
            "auc": float(roc_auc_score(labels > 0.5, scores)),
            "accuracy": float(((scores > 0.5) == (labels > 0.5)).mean()),
        }
        write_json(f"judges/{name}.json", {"judge": specification, "rows": {"unseen": len(rows)}, "metrics": metrics})


# --- sweeps, ranks, times ---


def sweeps(jobs: int) -> None:
    run_all(sweep_jobs(), jobs, keep_json)


def measure_stopped(jobs: int) -> None:
    """Measure the finished cells of sweeps that were stopped; `sweeps` can still continue them."""
    began = [job for job in sweep_jobs() if Path(f"sweeps/{job.name}/generations.jsonl").exists()]
    stopped = [job for job in began if not Path(job.makes).exists()]
    parts = [replace(job, command=[*job.command, "--only-measure"], makes=f"{job.makes}.part") for job in stopped]
    for part in parts:
        Path(part.makes).unlink(missing_ok=True)
    run_all(parts, jobs, keep_json)


def sweep_jobs() -> list[Job]:
    """One run for each number of candidates: guides are compared at the same number, and runs stay short."""
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
    models = [name for name in MODELS if ("-v" in name or "-q" in name) and not name.endswith("-again")]
    run_all([rank_job(name) for name in models], jobs, keep_json)


def rank_job(name: str) -> Job:
    command = [*RADQ, "rank", "model", f"models/{name}", "--data", DATA[name.split("-")[0]], "--batch-size", "256"]
    command += ["--rows", "64,128,256,512,1024", "--json"]
    return Job(f"rank-{name}", command, f"rank/{name}.json")


def time_tokens(jobs: int) -> None:
    """Measure 25 and 1,000 texts at once, with a RAD-V of random weights, which takes as long as a trained one."""
    command = [*RADQ, "bench", "--reward", "models/toxicity-q", "--guides", "q", "v", "--rounds", "7", "--json"]
    command += ["--kl-budget", "none"]
    command += ["--new-tokens", "20", "--prompt-tokens", "12"]
    command += ["--top-k", "5", "10", "20", "40", "60", "80", "100"]
    parts = {rows: f"timing/{rows}.json" for rows in (25, 1000)}
    run_all([Job(f"time-{rows}", [*command, "--rows", str(rows)], part) for rows, part in parts.items()], 1, keep_json)
    documents = [json.loads(Path(part).read_text()) for part in parts.values()]
    rows = [timed_row(timing) for document in documents for timing in document["timings"] if not timing["captured"]]
    machine = f"{documents[0]['machine']}, torch {documents[0]['torch']}"
    write_json("timing.json", {"machine": machine, "base": documents[0]["lm"], "rows": rows})


def timed_row(timing: dict[str, Any]) -> dict[str, Any]:
    """A line of timing.json."""
    guide = {"none": "none", "q": "rad-q", "v": "rad-v"}[timing["guide"]]
    times = timing["milliseconds"]
    return {
        "guide": guide,
        "k": timing["top_k"],
        "batch": timing["rows"],
        "milliseconds_per_token": times["median"],
        "low": times["low"],
        "high": times["high"],
    }


def expressivity(jobs: int) -> None:
    def keep(job: Job, output: str, seconds: float) -> None:
        Path("expressivity").mkdir(exist_ok=True)
        Path(job.makes).write_text(output)

    script = [sys.executable, str(EXPRESSIVITY), "--device", "cuda", "--kind"]
    run_all([Job(f"expressivity-{kind}", [*script, kind], f"expressivity/{kind}.txt") for kind in "vq"], jobs, keep)


# --- texts ---


def samples(jobs: int) -> None:
    """The first sample of the first prompts, unguided and guided by the shipped readouts at their default β."""
    lm, tokenizer = load("embedded", "cpu")
    rows = []
    for name, kind, count in SHOWN:
        beta = ATTRIBUTES[name].default_beta
        guide = RewardGuide(RewardModel.from_pretrained(f"embedded:{name}"), {name: beta})
        prompts = [row["prompt"] for row in islice(read_lines(Path(f"data/{kind}.jsonl")), count)]
        pairs = zip(*(generate(lm, tokenizer, prompts, one, kl_budget=None) for one in (None, guide)), strict=True)
        rows += [
            {"attribute": name, "prompt": plain.prompt, "beta": beta, "unguided": plain.text, "guided": guided.text}
            for plain, guided in pairs
        ]
    Path("samples.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def excerpts(jobs: int) -> None:
    """The first samples of every prompt in measured cells: small files to look at, and to take to another machine."""
    for metrics in sorted(Path("sweeps").glob("*-k*/metrics.jsonl")):
        file = Path("excerpts") / f"{metrics.parent.name}.jsonl.xz"
        if file.exists() and file.stat().st_mtime > metrics.stat().st_mtime:
            continue
        measured = {row["cell"] for row in read_lines(metrics)}
        with whole_file(file) as temporary, lzma.open(temporary, "wt", preset=1) as stream:
            for row in read_lines(metrics.with_name("generations.jsonl")):
                if row["cell"] not in measured:
                    break
                kept = {name: row[name] for name in ("cell", "prompt", "group")}
                stream.write(json.dumps(kept | {"continuations": row["continuations"][:EXCERPT]}) + "\n")


def mauve(jobs: int) -> None:
    """MAUVE of each cell against the unguided texts of the same prompts; a process for each sweep and k."""
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


# --- the command line ---


def convert(gguf: str) -> None:
    """Write the language model of a GGUF file into the folder that a contest of another base model reads."""
    convert_gguf(gguf, CONVERTED, torch.bfloat16)


PIECES: dict[str, Callable[[int], None]] = {
    "train": train,
    "judges": judges,
    "sweeps": sweeps,
    "measure": measure_stopped,
    "rank": rank,
    "time": time_tokens,
    "costs": measure_costs,
    "expressivity": expressivity,
    "samples": samples,
    "excerpts": excerpts,
    "mauve": mauve,
}


def record_piece(piece: str, seconds: float, commit: str) -> None:
    """Append the piece with its hardware, versions and seconds to pieces.jsonl."""
    line = {
        "piece": piece,
        "command": f"python study/run.py {piece}",
        "commit": commit,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "seconds": round(seconds),
    }
    with Path("pieces.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def find_commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def gpu_memory() -> float:
    """GB of the GPU, less what its driver takes; no limit without one."""
    return 0.92 * torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else math.inf


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="piece", required=True)
    functions: dict[str, Callable[..., None]] = {"prepare": prepare, "convert": convert, **PIECES, **CONTEST_PIECES}
    for piece, function in functions.items():
        command = commands.add_parser(piece, help=(function.__doc__ or "").split("\n")[0])
        command.add_argument("--folder", type=Path, required=True, help="the folder of the study; data/ lies in it")
        if piece == "prepare":
            for source in ("rtp", "neutral", "negative", "imdb"):
                command.add_argument(source, type=os.path.abspath)
        elif piece == "convert":
            command.add_argument("gguf", type=os.path.abspath)
        else:
            command.add_argument("--jobs", type=int, default=4, help="number of commands that run at the same time")
            command.add_argument("--commit", default=find_commit(), help="commit of radq, where there is no git")
        if piece in CONTEST_PIECES:
            command.add_argument("--base", choices=BASES, default=EMBEDDED.name, help="base model that is steered")
            command.add_argument("--only", default="", help="regular expression for TASK-METHOD; by default all")
            command.add_argument("--lm", default="", help="folder of TinyLlama-1.1B-Chat, for another perplexity")
            command.add_argument(
                "--shipped", action="store_true", help="test the sentiment model that radq brings along"
            )
            command.add_argument(
                "--memory", type=float, default=gpu_memory(), help="GB that commands may take together"
            )
            command.add_argument("--rehearse", action="store_true", help="tiny models and numbers, in minutes on a CPU")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.folder)
    if arguments.piece == "prepare":
        prepare(arguments.rtp, arguments.neutral, arguments.negative, arguments.imdb)
        return
    if arguments.piece == "convert":
        convert(arguments.gguf)
        return
    began = time.time()
    if arguments.piece in CONTEST_PIECES:
        settings = {field.name: getattr(arguments, field.name) for field in fields(Request)}
        request = Request(**settings | {"base": BASES[arguments.base]})
        request.check()
        CONTEST_PIECES[arguments.piece](request)
    else:
        PIECES[arguments.piece](arguments.jobs)
    record_piece(arguments.piece, time.time() - began, arguments.commit)


if __name__ == "__main__":
    try:
        main()
    except RadqError as error:
        sys.exit(f"error: {error}")
