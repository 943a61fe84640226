"""A second judge of sentiment, over MiniLM, MAUVE and another perplexity, all on the kept texts of a contest.

second/judge.json            AUC and accuracy of the judge on texts that it has not seen
second/sentiment-METHOD.npz  CELL: the score of the text of each prompt
second/mauve.jsonl           a line per method and class of prompts: MAUVE of the cell nearest to the perplexity at
                             which settings were chosen (of the best cell, for methods without β), against the second
                             seed of the unguided base model; the line of the unguided base model itself is the value
                             that chance alone leaves
second/likelihood-TASK-METHOD.npz   CELL: negative log-likelihood and number of tokens of the text of each prompt under
                             another language model, (2, p)
"""

import json
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jobs import RADQ, Job, Run, keep_json, run_all, run_command, write_json
from kept import KeptCell, find_prompts, read_kept
from methods import BASE, METHODS, TASKS
from places import Place, likelihood_file, read_mauve, read_places, second_file

from radq import load
from radq.evaluation.mauve import MAUVE_MIN_SAMPLES, mauve
from radq.evaluation.perplexity import measure_likelihoods
from radq.files import read_lines, whole_file
from radq.judges.base import Judge
from radq.judges.encoders import Encoder, load_encoder
from radq.judges.models import load_judge
from radq.models.loading import find_device

TASK, JUDGE, ENCODER = "sentiment", "models/judge-minilm", "minilm"
BATCH = 256  # texts whose likelihoods are measured together


def second_opinions(folder: Path, only: str = "", lm: str = "", run: Run = run_command) -> None:
    """Judge and compare the texts that have not been; `only` selects methods by TASK-METHOD.

    `lm` is the folder of another language model, under which perplexity is measured; there is none by default.
    """
    methods = [name for name in METHODS if re.search(only, f"{TASK}-{name}")]
    prompts = {name: find_prompts(folder, task) for name, task in TASKS.items()}
    judge = train_judge(folder, run)
    for method in methods:
        judge_method(folder, method, prompts[TASK], judge)
    compute_mauve(folder, only)
    if lm:
        measure_fluency(folder, only, prompts, lm)


def forget_opinions(folder: Path, task: str, method: str) -> None:
    """Delete what was measured on the kept texts of a method, since these will be others."""
    for file in (second_file(folder, task, method), likelihood_file(folder, task, method)):
        file.unlink(missing_ok=True)
    found = folder / "second" / "mauve.jsonl"
    if found.exists():
        lines = [row for row in read_lines(found) if (row["task"], row["method"]) != (task, method)]
        with whole_file(found) as temporary:
            temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in lines))


# --- the judge ---


def train_judge(folder: Path, run: Run) -> Judge:
    """Train the judge, and measure it on texts that it has not seen, unless that is done."""
    command = [*RADQ, "judge", "train", "--data", f"data/judge-{TASK}.jsonl", "--labels", TASK, "--encoder", ENCODER]
    job = Job("judge-minilm", [*command, "--out", JUDGE, "--overwrite", "--json"], f"{JUDGE}.json")
    run_all([job], 1, keep_json, run)
    judge = load_judge(f"linear:{JUDGE}", find_device("auto"))
    if not (folder / "second" / "judge.json").exists():
        from sklearn.metrics import roc_auc_score

        rows = list(read_lines(folder / "data" / f"judge-{TASK}-unseen.jsonl"))
        scores, labels = judge.score([row["text"] for row in rows]), np.array([row[TASK] for row in rows]) > 0.5
        metrics = {"auc": float(roc_auc_score(labels, scores)), "accuracy": float(((scores > 0.5) == labels).mean())}
        write_json(str(folder / "second" / "judge.json"), {"encoder": ENCODER, "unseen": len(rows), "metrics": metrics})
    return judge


def judge_method(folder: Path, method: str, prompts: list[str], judge: Judge) -> None:
    """Write the scores of the kept texts of a method."""
    file, cells = second_file(folder, TASK, method), read_kept(folder, TASK, method)
    if file.exists() or not cells:
        return
    scores = {cell.name: judge.score(add_prompts(prompts, cell.texts)).astype(np.float32) for cell in cells}
    with whole_file(file) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **scores)
    print(f"second-{TASK}-{method}: done", flush=True)


def add_prompts(prompts: list[str], texts: list[str]) -> list[str]:
    """What the judge reads; a blank text stays blank."""
    return [prompt + text if text.strip() else text for prompt, text in zip(prompts, texts, strict=True)]


# --- another perplexity ---


def measure_fluency(folder: Path, only: str, prompts: dict[str, list[str]], name: str) -> None:
    """Write the likelihoods of the kept texts under another language model."""
    missing = [
        (task, method)
        for task, method in product(TASKS, METHODS)
        if re.search(only, f"{task}-{method}") and not likelihood_file(folder, task, method).exists()
    ]
    lm, tokenizer = load(name, device=find_device("auto"))
    for task, method in missing:
        cells = read_kept(folder, task, method)
        if cells:
            found = {cell.name: _likelihoods(lm, tokenizer, prompts[task], cell.texts) for cell in cells}
            with whole_file(likelihood_file(folder, task, method)) as temporary, temporary.open("wb") as stream:
                np.savez_compressed(stream, **found)
            print(f"likelihood-{task}-{method}: done", flush=True)


def _likelihoods(lm: Any, tokenizer: Any, prompts: list[str], texts: list[str]) -> np.ndarray:
    found = measure_likelihoods(lm, tokenizer, prompts, texts, batch_size=BATCH, progress=True)
    return np.stack([found.nll, found.tokens]).astype(np.float32)


# --- MAUVE ---


def compute_mauve(folder: Path, only: str = "") -> None:
    """Append the lines of mauve.jsonl that are missing."""
    encoder, done = load_encoder(ENCODER, find_device("auto")), read_mauve(folder)
    for place in read_places(folder):
        reference = next((cell for cell in place.cells[BASE] if cell.settings["seed"] == 1), None)
        if reference is None:
            continue
        wanted = [(name, place.shown(name)) for name in METHODS]
        missing = [
            (name, cell)
            for name, cell in wanted
            if cell is not None
            and re.search(only, f"{place.task.name}-{name}")
            and (place.task.name, name, cell.name, place.group) not in done
        ]
        against = encode(encoder, place, reference) if missing else np.zeros((0, 0))
        for name, cell in missing:
            value = mauve(encode(encoder, place, cell), against)
            row = {"task": place.task.name, "method": name, "cell": cell.name, "group": place.group, "value": value}
            with (folder / "second" / "mauve.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(f"mauve-{place.task.name}-{name}, {place.group}: {value:.3f}", flush=True)


def encode(encoder: Encoder, place: Place, cell: KeptCell) -> np.ndarray:
    """The features of a cell's texts that are not blank."""
    texts = [text for n in place.rows if (text := cell.texts[n]).strip()]
    if len(texts) < MAUVE_MIN_SAMPLES:
        sys.exit(f"error: {cell.name} has {len(texts)} texts, and MAUVE needs {MAUVE_MIN_SAMPLES}.")
    return encoder.encode(texts)
