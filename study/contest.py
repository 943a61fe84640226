"""The contest of methods: all jobs up to the kept numbers of each, second opinions on kept texts, times, publication.

second/judge.json            AUC and accuracy of a second judge of sentiment, over MiniLM, on texts that it has not seen
costs.json                   machine, torch, commands, and for each method the median ratio of times with its quartiles

kept.py says what lies beside these, methods.py how methods take part.
"""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import kept
import methods
import models
import numpy as np

from radq import RadV, load
from radq.evaluation.metrics import MAUVE_MIN_SAMPLES, mauve
from radq.evaluation.perplexity import measure_likelihoods
from radq.files import read_lines
from radq.judges.agreement import measure_agreement
from radq.judges.base import Judge
from radq.judges.models import load_judge
from radq.judges.readers import Encoder, load_encoder
from radq.models.loading import find_device
from radq.sources.embedded import reward_folder


@dataclass(frozen=True)
class Request:
    """How a piece is to be run."""

    jobs: int = 4  # commands at the same time
    base: models.BaseModel = models.SMOLLM2
    only: str = ""  # a regular expression for TASK-METHOD; by default all
    shipped: bool = False  # whether the readout of sentiment is the one that radq brings along
    lm: str = ""  # another language model for the perplexity of kept texts
    memory: float = math.inf  # GB of the GPU that commands may take together

    def wants(self, task: str, method: str) -> bool:
        return self.base.takes_part(method) and bool(re.search(self.only, f"{task}-{method}"))

    def run(self, jobs: list[models.Job]) -> None:
        models.run_all([self.base.fit_memory(job) for job in jobs], self.jobs, self.memory)

    def check(self) -> None:
        """Refuse to mix two base models, or models of others with shipped ones."""
        if self.shipped and self.base != models.SMOLLM2:
            sys.exit(f"error: radq brings no readout of {self.base.title} along; leave --shipped out.")
        models.claim_folder(self.base)


def contest(request: Request) -> None:
    """Train models, try settings on dev prompts, test each method with its choice, and keep the numbers.

    Each job begins as soon as the files are there that it needs. Methods whose models are trained go before trainings.
    What no kept number needs that is still missing is not run.
    """
    request.base.prepare()
    Path("models").mkdir(exist_ok=True)
    if request.shipped:
        take_shipped()
    keep = [keep_job(*run) for run in methods.RUNS if request.wants(run[0].name, run[1].name)]
    tests = [testing_job(*run, request.base) for run in methods.RUNS]
    request.run(models.find_needed(keep, [*keep, *tests, *choosing_jobs(request.base), *training_jobs(request.base)]))


def take_shipped() -> None:
    """Put the sentiment model that radq brings along in the place of our first training."""
    folder = Path(methods.model_folder(methods.TASKS[models.RECIPE], methods.OURS))
    if not folder.exists():
        shutil.copytree(reward_folder(models.RECIPE), folder)
    models.write_json(f"{folder}.json", {"command": "shipped with radq", "metrics": {}})


def training_jobs(base: models.BaseModel) -> list[models.Job]:
    trainings = [
        models.training_job(name, base.fit_training(name, settings)) for name, settings in models.CONTEST_MODELS.items()
    ]
    return [*(base.fit_own_texts(models.own_texts_job(attribute)) for attribute in models.READS), *trainings]


def choosing_jobs(base: models.BaseModel) -> list[models.Job]:
    """The sweeps over dev prompts, the slowest first."""
    return [
        contest_job(f"dev/{name}", task, _guiding(sweep), base, lambda of=sweep: of)
        for method, task in product(methods.CHOOSING, methods.TASKS.values())
        for name, sweep in methods.dev_sweeps(task, method, base.fit_models(method.models)).items()
    ]


def _guiding(sweep: dict[str, Any]) -> list[str]:
    return [guide["folder"] for guide in sweep["guides"].values()]


def testing_job(task: methods.Task, method: methods.Method, base: models.BaseModel) -> models.Job:
    """The sweep over test prompts, with the settings that are chosen once all of them were tried on dev prompts."""
    choosing = methods.METHODS[method.like or method.name]
    guiding, tried = base.fit_models(method.models), base.fit_models(choosing.models)
    choice = Path(methods.choice_file(task, choosing))
    needs: list[str] = []
    if choice.exists() and not method.like:
        guiding = (json.loads(choice.read_text())["chosen"]["model"],)
    elif choosing.dev_beta and not choice.exists():
        needs = [f"dev/{name}.json" for name in methods.dev_sweeps(task, choosing, tried)]

    def settings() -> dict[str, Any]:
        if not choosing.dev_beta:
            return methods.contest_sweep(task, method, {})
        if not choice.exists():
            models.write_json(choice, methods.choose_settings(task, choosing, tried))
        return methods.contest_sweep(task, method, json.loads(choice.read_text())["chosen"])

    folders = [methods.model_folder(task, model) for model in guiding]
    return contest_job(f"contest/{task.name}-{method.name}", task, folders, base, settings, needs)


def contest_job(
    run: str,
    task: methods.Task,
    guiding: Sequence[str],
    base: models.BaseModel,
    settings: Callable[[], dict[str, Any]],
    needs: Sequence[str] = (),
) -> models.Job:
    """A sweep, which waits for the models that guide and for their judge."""
    needs = [*needs, *(f"{model}.json" for model in (*guiding, f"models/judge-{task.name}"))]
    return models.sweep_job(run, lambda: base.fit_sweep(settings()), needs)


def keep_job(task: methods.Task, method: methods.Method) -> models.Job:
    name = f"{task.name}-{method.name}"
    command = [sys.executable, str(models.HERE / "kept.py"), task.name, method.name]
    return models.Job(f"contest-{name}-keep", command, f"kept/{name}.npz", (f"contest/{name}.json",))


# --- second opinions on kept texts ---

JUDGED, JUDGE, ENCODER = "sentiment", "models/judge-minilm", "minilm"
BATCH = 256  # texts whose likelihoods are measured together


def second(request: Request) -> None:
    """Judge the kept texts of sentiment by a judge over MiniLM, and compute MAUVE and another perplexity."""
    prompts = {name: kept.find_prompts(Path(), task) for name, task in methods.TASKS.items()}
    judge = train_judge()
    for method in methods.METHODS:
        if request.wants(JUDGED, method):
            judge_method(method, prompts[JUDGED], judge)
    compare_texts(request)
    if request.lm:
        measure_fluency(request, prompts)


def train_judge() -> Judge:
    """Train the judge, and measure it on texts that it has not seen, unless that is done."""
    command = [*models.RADQ, "judge", "train", "--data", f"data/judge-{JUDGED}.jsonl", "--labels", JUDGED]
    command += ["--encoder", ENCODER, "--out", JUDGE, "--overwrite", "--json"]
    models.run_all([models.Job("judge-minilm", command, f"{JUDGE}.json", keep=models.keep_json)], 1)
    judge = load_judge(f"linear:{JUDGE}", find_device("auto"))
    if not Path("second/judge.json").exists():
        rows, metrics = measure_judge(judge, JUDGED)
        models.write_json("second/judge.json", {"encoder": ENCODER, "unseen": rows, "metrics": metrics})
    return judge


def measure_judge(judge: Judge, attribute: str) -> tuple[int, dict[str, float | None]]:
    """The number of unseen texts, and how well the judge's scores agree with their labels."""
    rows = list(read_lines(Path(f"data/judge-{attribute}-unseen.jsonl")))
    labels = np.array([row[attribute] for row in rows], dtype=np.float64)
    found = measure_agreement(judge.score([row["text"] for row in rows]), labels)
    return len(rows), {"spearman": found.spearman, "auc": found.auc, "accuracy": found.accuracy}


def judge_method(method: str, prompts: list[str], judge: Judge) -> None:
    """Write the scores of the kept texts of a method; a blank text is read without its prompt."""
    file, scores = kept.second_file(Path(), JUDGED, method), {}
    if file.exists():
        return
    for cell in kept.read_kept(Path(), JUDGED, method):
        read = [prompt + text if text.strip() else text for prompt, text in zip(prompts, cell.texts, strict=True)]
        scores[cell.name] = judge.score(read).astype(np.float32)
    if scores:
        kept.write_arrays(file, scores)


def measure_fluency(request: Request, prompts: dict[str, list[str]]) -> None:
    """Write the likelihoods of the kept texts under another language model."""
    lm, tokenizer = load(request.lm, device=find_device("auto"))
    for task, method in product(methods.TASKS, methods.METHODS):
        file, found = kept.likelihood_file(Path(), task, method), {}
        if file.exists() or not request.wants(task, method):
            continue
        for cell in kept.read_kept(Path(), task, method):
            one = measure_likelihoods(lm, tokenizer, prompts[task], cell.texts, batch_size=BATCH, progress=True)
            found[cell.name] = np.stack([one.nll, one.tokens]).astype(np.float32)
        if found:
            kept.write_arrays(file, found)


def compare_texts(request: Request) -> None:
    """Append the missing lines of mauve.jsonl: MAUVE of the cells that stand for methods, against the second seed of
    the unguided base model. The line of the unguided base model itself is the value that chance alone leaves."""
    encoder, done = load_encoder(ENCODER, find_device("auto")), kept.read_mauve(Path())
    for place in kept.read_places(Path()):
        reference = next((cell for cell in place.cells[methods.BASE] if cell.settings["seed"] == 1), None)
        wanted = {name: place.shown(name) for name in methods.METHODS if request.wants(place.task.name, name)}
        missing = {
            name: cell
            for name, cell in wanted.items()
            if cell is not None and (place.task.name, name, cell.name, place.group) not in done
        }
        if reference is None or not missing:
            continue
        against = encode(encoder, place, reference)
        for name, cell in missing.items():
            value = mauve(encode(encoder, place, cell), against)
            row = {"task": place.task.name, "method": name, "cell": cell.name, "group": place.group, "value": value}
            append(Path("second/mauve.jsonl"), row)


def append(file: Path, row: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def encode(encoder: Encoder, place: kept.Place, cell: kept.KeptCell) -> np.ndarray:
    """The features of a cell's texts that are not blank."""
    texts = [text for n in place.rows if (text := cell.texts[n]).strip()]
    if len(texts) < MAUVE_MIN_SAMPLES:
        sys.exit(f"error: {cell.name} has {len(texts)} texts, and MAUVE needs {MAUVE_MIN_SAMPLES}.")
    return encoder.encode(texts)


# --- what methods cost, and what is published ---

ALL_LAYERS = "models/all-layers"
REWARDS = {"readout": "embedded:sentiment", "first-layers": "", "all-layers": ALL_LAYERS}  # by default 12 layers
TIMED = {  # what is measured with each of these: a guide of `radq bench`, and the methods that it stands for
    "readout": {"q": (methods.OURS, methods.OURS_AGAIN, "readout-gedi")},
    "first-layers": {"q": ("rad-q",), "gedi": ("gedi-small",)},
    "all-layers": {"v": ("classifier",), "dexperts": ("dexperts",), "gedi": ("gedi",)},
}


def costs(jobs: int) -> None:
    """Measure the time per token of every kind of guide, as a multiple of decoding without one.

    Weights do not change the time, so they are random but for the readout's, and the models have the layers of the
    contest's.
    """
    if not Path(ALL_LAYERS).exists():
        RadV.from_backbone("embedded", attributes=["reward"]).save_pretrained(ALL_LAYERS)
    models.write_json(kept.COSTS, summarise_costs(models.run_benches({name: cost_job(name) for name in TIMED})))


def cost_job(name: str) -> models.Job:
    reward = ["--reward", REWARDS[name]] if REWARDS[name] else []
    options = ["--lm", "embedded", *reward, "--guides", *TIMED[name], "--top-k", methods.PLAIN_K]
    return models.bench_job(f"costs-{name}", f"costs/{name}.json", *options, rows=kept.COST_ROWS)


def summarise_costs(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The content of costs.json from what `radq bench` printed: for each method the median ratio with its quartiles."""
    ratios = {
        method: timing["ratio"]
        for name, document in documents.items()
        for timing in document["timings"]
        for method in TIMED[name].get(timing["guide"], ())
    }
    first = next(iter(documents.values()))
    commands = [" ".join(["radq", *cost_job(name).command[len(models.RADQ) :]]) for name in documents]
    return {"machine": first["machine"], "torch": first["torch"], "commands": commands, "over_unguided": ratios}


def publish(out: str) -> None:
    """Copy the numbers of the contest that can be published: what its page needs, and the metrics of its models.

    The folder of a run that went on from published numbers holds these, too, so they are replaced as a whole.
    """
    folder = Path(out)
    (folder / "models").mkdir(parents=True, exist_ok=True)
    for name in filter(os.path.exists, ("choices", "kept", "second")):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(name, folder / name)
    files = (models.BASE_FILE, kept.COSTS, *(f"models/{name}.json" for name in models.CONTEST_MODELS))
    for file in filter(os.path.exists, files):
        shutil.copy(file, folder / file)
