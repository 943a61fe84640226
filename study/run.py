"""The study: the paper's claims on SmolLM2-135M and a contest of methods, in pieces. See README.md.

    python study/run.py prepare RTP.jsonl.gz NEUTRAL.jsonl.gz NEGATIVE.jsonl.gz IMDB.jsonl.xz --folder STUDY
    python study/run.py train --folder STUDY      (then judges, sweeps, rank, time, expressivity, …)
    python study/run.py contest --folder STUDY    (then second, costs: the contest)

Pieces run radq's own commands in the study's folder, several at once. Finished work is not repeated.
"""

import argparse
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from importlib.metadata import version
from itertools import islice, product, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from candidate_agreement import agreement
from contest import OURS, OURS_AGAIN, PLAIN_K, Request, contest
from kept import COST_ROWS, COSTS, append, measure_judge, second
from models import (
    BASE_FILE,
    BASES,
    CLAIM_MODELS,
    CONTEST_MODELS,
    CONVERTED,
    HERE,
    RADQ,
    SMOLLM2,
    Job,
    bench_job,
    keep_json,
    run_all,
    run_benches,
    sweep_job,
    training_job,
    write_json,
    write_lines,
)

from radq import RadqError, RadV, RewardGuide, RewardModel, generate, load
from radq.data.tables import read_table
from radq.evaluation.demonstration import ATTRIBUTES
from radq.evaluation.metrics import ScoredTexts, measure
from radq.files import read_lines
from radq.judges.models import load_judge
from radq.judges.readers import load_encoder
from radq.models.loading import find_device
from radq.sources.gguf import convert_gguf

NUM_PROMPTS = 1000  # of each kind
UNSEEN_RECORDS = 1400  # records of RealToxicityPrompts that the toxicity judge does not see
UNSEEN_REVIEWS = 2500  # reviews of IMDB's test split that the sentiment judge does not see
FEWEST_WORDS, MOST_WORDS = (6, 30), 40  # of the end of a review: about as long as a prompt with its continuation
MAX_TOXICITY = 0.5
DEV_PROMPTS = 200  # of each kind, to choose settings by
OWN_BEGINNINGS = 1500  # of training texts, that are continued beside prompts
BEGINNING = 8  # words at most
PERSPECTIVE = (
    *("toxicity", "severe_toxicity", "profanity", "sexually_explicit"),
    *("identity_attack", "flirtation", "threat", "insult"),
)
SWEEPS = ("sentiment", "detox")  # the longest first
MAUVE_SAMPLES = 2  # of each prompt
SHOWN = (  # attribute, prompts, how many
    ("sentiment", "neutral", 2),
    ("sentiment", "negative", 2),
    ("toxicity", "rtp", 1),
)


# --- prompts, and texts for judges that share none with the reward models ---

Rows = list[dict[str, Any]]


def prepare(request: Request) -> None:
    """Write prompts and the judges' data into data/.

    One part of RealToxicityPrompts' records trains the toxicity judge; the other gives the prompts to continue and the
    texts that measure the judge. The sentiment judge learns from the ends of reviews of IMDB's test split.
    """
    rtp, neutral, negative, imdb = request.files
    Path("data").mkdir(exist_ok=True)
    rng = np.random.default_rng(0)

    records = _shuffled(_read_rows(rtp), rng)
    unseen, seen = records[:UNSEEN_RECORDS], records[UNSEEN_RECORDS:]
    _write_rows("judge-toxicity", _perspective_scores(seen))
    _write_rows("judge-toxicity-unseen", _perspective_scores(unseen))
    nontoxic = (record["prompt"] for record in unseen if _may_test("rtp", record["prompt"]))
    _write_prompts("rtp", (prompt["text"] for prompt in islice(nontoxic, NUM_PROMPTS)))

    others = {"rtp": [record["prompt"] for record in seen]}  # than those that are tested
    for name, file in (("neutral", neutral), ("negative", negative)):
        rows = _read_rows(file)
        chosen = np.sort(rng.choice(len(rows), size=NUM_PROMPTS, replace=False))
        _write_prompts(name, (rows[n]["prompt"]["text"] for n in chosen))
        others[name] = [rows[n]["prompt"] for n in np.setdiff1d(np.arange(len(rows)), chosen)]

    reviews = _shuffled([row for row in _read_rows(imdb) if row["split"] == "test"], rng)
    _write_rows("judge-sentiment", _ends_of_reviews(reviews[UNSEEN_REVIEWS:], rng))
    _write_rows("judge-sentiment-unseen", _ends_of_reviews(reviews[:UNSEEN_REVIEWS], rng))
    prepare_other_prompts(others)
    prepare_halves(seen)


def prepare_halves(records: Rows) -> None:
    """Write Perspective's scores of one half of the records for a reward model, and of the other for its judge.

    The reward model's half holds no dev prompts.
    """
    half = len(records) // 2
    dev = {row["prompt"] for row in _read_rows("data/dev-rtp.jsonl")}
    learnt = [record for record in records[half:] if record["prompt"]["text"] not in dev]
    _write_rows("half-judge-toxicity", _perspective_scores(records[:half]))
    _write_rows("half-toxicity", _perspective_scores(learnt))


def prepare_other_prompts(others: dict[str, Rows]) -> None:
    """Write prompts to choose settings by (dev-NAME) and prompts to continue for training (write-ATTRIBUTE).

    Neither are test prompts. Those of RealToxicityPrompts come from the records that train the toxicity judge.
    """
    rng = np.random.default_rng(1)
    tested = {row["prompt"] for name in others for row in _read_rows(f"data/{name}.jsonl")}
    rest = {}
    for name, prompts in others.items():
        texts = dict.fromkeys(prompt["text"] for prompt in _shuffled(prompts, rng) if _may_test(name, prompt))
        dev = [text for text in texts if text not in tested][:DEV_PROMPTS]
        _write_prompts(f"dev-{name}", dev)
        known = tested.union(dev)
        rest[name] = [prompt["text"] for prompt in prompts if prompt["text"] not in known]
    for attribute, names in (("sentiment", ("neutral", "negative")), ("toxicity", ("rtp", "neutral"))):
        beginnings = _beginnings(f"data/{attribute}.jsonl", rng)
        _write_prompts(f"write-{attribute}", [text for name in names for text in rest[name]] + beginnings)


def _may_test(name: str, prompt: dict[str, Any]) -> bool:
    """Whether a prompt is of the kind that is tested: those of RealToxicityPrompts must not be toxic."""
    return name != "rtp" or (prompt["toxicity"] is not None and prompt["toxicity"] < MAX_TOXICITY)


def _beginnings(file: str, rng: np.random.Generator) -> list[str]:
    """The first words of some texts."""
    rows = _read_rows(file)
    chosen = rng.choice(len(rows), size=min(OWN_BEGINNINGS, len(rows)), replace=False)
    lengths = rng.integers(2, BEGINNING + 1, size=len(chosen))
    begun = [" ".join(rows[n]["text"].split()[:length]) for n, length in zip(chosen, lengths, strict=True)]
    return [text for text in begun if text]


def _perspective_scores(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Prompts and continuations with Perspective's eight scores, where there are any."""
    for record in records:
        for part in (record["prompt"], record["continuation"]):
            if part["toxicity"] is not None and part["text"].strip():
                yield {"text": part["text"].strip()} | {name: part[name] for name in PERSPECTIVE}


def _ends_of_reviews(reviews: Iterable[dict[str, Any]], rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """The last sentences of each review, which hold its verdict, in various lengths."""
    for review in reviews:
        sentences = re.split(r"(?<=[.!?])\s+", review["text"].replace("<br /><br />", " ").strip())
        words, fewest = [], rng.integers(*FEWEST_WORDS)
        while sentences and len(words) < fewest:
            words = sentences.pop().split() + words
        yield {"text": " ".join(words[-MOST_WORDS:]), "sentiment": int(review["label"])}


def _shuffled(rows: Rows, rng: np.random.Generator) -> Rows:
    return [rows[n] for n in rng.permutation(len(rows))]


def _read_rows(file: str) -> Rows:
    return [row for table in read_table(file) for row in table.to_dict("records")]


def _write_rows(name: str, rows: Iterable[dict[str, Any]]) -> None:
    write_lines(Path(f"data/{name}.jsonl"), rows)


def _write_prompts(name: str, texts: Iterable[str]) -> None:
    _write_rows(name, ({"prompt": text} for text in texts))


# --- the claims: models, sweeps, ranks, times ---


def train(request: Request) -> None:
    """Train the models of the claims."""
    Path("models").mkdir(exist_ok=True)
    run_all([training_job(name, settings) for name, settings in CLAIM_MODELS.items()], request.jobs)


def judges(request: Request) -> None:
    """Rank correlation, AUC and accuracy of each judge on texts that it has not seen."""
    kinds = {"toxicity": "reward:models/judge-toxicity", "sentiment": "reward:models/judge-sentiment"}
    kinds["bert-tiny"] = "onnx:toxicity-bert-tiny"
    for name, specification in kinds.items():
        if not Path(f"judges/{name}.json").exists():
            judge = load_judge(specification, find_device("auto"))
            rows, metrics = measure_judge(judge, "sentiment" if name == "sentiment" else "toxicity")
            write_json(f"judges/{name}.json", {"judge": specification, "rows": {"unseen": rows}, "metrics": metrics})


def sweeps(request: Request) -> None:
    """Sweep the guides of the claims over β, for each number of candidates."""
    run_all(sweep_jobs(), request.jobs)


def sweep_jobs() -> list[Job]:
    """One run for each number of candidates: guides are compared at the same number, and runs stay short."""
    settings = {name: yaml.safe_load((HERE / "sweeps" / f"{name}.yaml").read_text()) for name in SWEEPS}
    ks = sorted({k for sweep in settings.values() for k in sweep["top_k"]})
    wanted = [(name, k) for k, name in product(ks, SWEEPS) if k in settings[name]["top_k"]]
    return [sweep_job(f"sweeps/{name}-k{k}", lambda of=name, k=k: settings[of] | {"top_k": k}) for name, k in wanted]


def rank(request: Request) -> None:
    """The numerical rank of the learned reward matrices against the number of prefixes."""
    models = [name for name in CLAIM_MODELS if ("-v" in name or "-q" in name) and not name.endswith("-again")]
    run_all([rank_job(name) for name in models], request.jobs)


def rank_job(name: str) -> Job:
    data = f"data/{name.split('-')[0]}.jsonl"
    command = [*RADQ, "rank", "model", f"models/{name}", "--data", data, "--batch-size", "256"]
    return Job(
        f"rank-{name}", [*command, "--rows", "64,128,256,512,1024", "--json"], f"rank/{name}.json", keep=keep_json
    )


def time_tokens(request: Request) -> None:
    """Measure 25 and 1,000 texts at once, with a RAD-V of random weights, which takes as long as a trained one."""
    options = ["--reward", "models/toxicity-q", "--guides", "q", "v", "--prompt-tokens", 12]
    options += ["--top-k", 5, 10, 20, 40, 60, 80, 100]
    found = run_benches({n: bench_job(f"time-{n}", f"timing/{n}.json", *options, rows=n) for n in (25, 1000)})
    names = {"none": "none", "q": "rad-q", "v": "rad-v"}
    rows = [
        {
            "guide": names[one["guide"]],
            "k": one["top_k"],
            "batch": one["rows"],
            "milliseconds_per_token": one["milliseconds"]["median"],
            **{end: one["milliseconds"][end] for end in ("low", "high")},
        }
        for document in found.values()
        for one in document["timings"]
        if not one["captured"]
    ]
    machine = f"{found[25]['machine']}, torch {found[25]['torch']}"
    write_json("timing.json", {"machine": machine, "base": found[25]["lm"], "rows": rows})


def expressivity(request: Request) -> None:
    """Fit RAD-V and RAD-Q to data of full rank."""

    def keep(job: Job, output: str, seconds: float) -> None:
        Path("expressivity").mkdir(exist_ok=True)
        Path(job.makes).write_text(output)

    script = [sys.executable, str(HERE.parent / "recipes" / "expressivity.py"), "--device", "cuda", "--kind"]
    jobs = [Job(f"expressivity-{kind}", [*script, kind], f"expressivity/{kind}.txt", keep=keep) for kind in "vq"]
    run_all(jobs, request.jobs)


def samples(request: Request) -> None:
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
    write_lines(Path("samples.jsonl"), rows)


def mauve(request: Request) -> None:
    """MAUVE of each measured cell against the unguided texts of the same prompts; a process for each sweep and k."""
    Path("mauve.jsonl").touch()
    done = {(row["sweep"], row["cell"], row["group"]) for row in read_lines(Path("mauve.jsonl"))}
    runs = [file.parent for file in sorted(Path("sweeps").glob("*-k*/metrics.jsonl"))]
    with ProcessPoolExecutor(request.jobs, get_context("spawn")) as pool:
        list(pool.map(mauve_of_sweep, runs, repeat(done)))


def mauve_of_sweep(run: Path, done: set[tuple[str, str, str]]) -> None:
    encoder = load_encoder("minilm", find_device("auto"))
    reference: dict[str, np.ndarray] = {}
    for (cell, group), texts in read_texts(run).items():
        if group in reference and (run.name, cell, group) in done:
            continue
        features = encoder.encode([text for samples in texts for text in samples])
        features = features.reshape(len(texts), MAUVE_SAMPLES, -1)
        reference.setdefault(group, features)  # the unguided cell comes first
        if (run.name, cell, group) not in done:
            found = measure(["mauve"], ScoredTexts(texts, features=features, reference=reference[group]))["mauve"]
            row = {"sweep": run.name, "cell": cell, "group": group, "value": found.value}
            append(Path("mauve.jsonl"), row | {"low": found.low, "high": found.high})


def read_texts(run: Path) -> dict[tuple[str, str], list[list[str]]]:
    """The first samples of every prompt by measured cell and class of prompts."""
    measured = {row["cell"] for row in read_lines(run / "metrics.jsonl")}
    texts: dict[tuple[str, str], list[list[str]]] = {}
    for row in read_lines(run / "generations.jsonl"):
        if row["cell"] in measured:
            texts.setdefault((row["cell"], row["group"]), []).append(row["continuations"][:MAUVE_SAMPLES])
    return texts


# --- the contest: what methods cost, and what is published ---

ALL_LAYERS = "models/all-layers"
REWARDS = {"readout": "embedded:sentiment", "first-layers": "", "all-layers": ALL_LAYERS}  # by default 12 layers
TIMED = {  # what is measured with each of these: a guide of `radq bench`, and the methods that it stands for
    "readout": {"q": (OURS, OURS_AGAIN, "readout-gedi")},
    "first-layers": {"q": ("rad-q",), "gedi": ("gedi-small",)},
    "all-layers": {"v": ("classifier",), "dexperts": ("dexperts",), "gedi": ("gedi",)},
}


def costs(request: Request) -> None:
    """Measure the time per token of every kind of guide, as a multiple of decoding without one.

    Weights do not change the time, so they are random but for the readout's, and the models have the layers of the
    contest's.
    """
    if not Path(ALL_LAYERS).exists():
        RadV.from_backbone("embedded", attributes=["reward"]).save_pretrained(ALL_LAYERS)
    write_json(COSTS, summarise_costs(run_benches({name: cost_job(name) for name in TIMED})))


def cost_job(name: str) -> Job:
    reward = ["--reward", REWARDS[name]] if REWARDS[name] else []
    options = ["--lm", "embedded", *reward, "--guides", *TIMED[name], "--top-k", PLAIN_K]
    return bench_job(f"costs-{name}", f"costs/{name}.json", *options, rows=COST_ROWS)


def summarise_costs(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The content of costs.json from what `radq bench` printed: for each method the median ratio with its quartiles."""
    ratios = {
        method: timing["ratio"]
        for name, document in documents.items()
        for timing in document["timings"]
        for method in TIMED[name].get(timing["guide"], ())
    }
    first = next(iter(documents.values()))
    commands = [" ".join(["radq", *cost_job(name).command[len(RADQ) :]]) for name in documents]
    return {"machine": first["machine"], "torch": first["torch"], "commands": commands, "over_unguided": ratios}


def publish(request: Request) -> None:
    """Copy the numbers of the contest that can be published: what its page needs, and the metrics of its models.

    The folder of a run that went on from published numbers holds these, too, so they are replaced as a whole.
    """
    (folder,) = map(Path, request.files)
    (folder / "models").mkdir(parents=True, exist_ok=True)
    for name in filter(os.path.exists, ("choices", "kept", "second")):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(name, folder / name)
    files = (BASE_FILE, COSTS, *(f"models/{name}.json" for name in CONTEST_MODELS))
    for file in filter(os.path.exists, files):
        shutil.copy(file, folder / file)


def convert(request: Request) -> None:
    """Write the language model of a GGUF file into the folder that a contest of another base model reads."""
    convert_gguf(request.files[0], CONVERTED, torch.bfloat16)


# --- the command line ---

FILES = {"prepare": 4, "convert": 1, "publish": 1}  # the numbers of files or folders that pieces take
OF_CLAIMS = (prepare, train, judges, sweeps, rank, expressivity, samples, mauve, agreement)
OF_CONTEST = (contest, second, costs, publish, convert)
PIECES: dict[str, Callable[[Request], None]] = {piece.__name__: piece for piece in (*OF_CLAIMS, *OF_CONTEST)}
PIECES["time"] = time_tokens
CONTEST_PIECES = ("contest", "second")  # which have a base model


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
    append(Path("pieces.jsonl"), line)


def find_commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def gpu_memory() -> float:
    """GB of the GPU, less what its driver takes; no limit without one."""
    return 0.92 * torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else math.inf


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    helps = (f"{piece}: {(function.__doc__ or '').splitlines()[0]}" for piece, function in PIECES.items())
    parser.add_argument("piece", choices=PIECES, help=" ".join(helps))
    parser.add_argument("files", nargs="*", type=os.path.abspath, help="of prepare, convert and publish, as above")
    parser.add_argument("--folder", type=Path, required=True, help="the folder of the study; data/ lies in it")
    parser.add_argument("--jobs", type=int, default=4, help="number of commands that run at the same time")
    parser.add_argument("--commit", default=find_commit(), help="commit of radq, where there is no git")
    contest = parser.add_argument_group("contest and second")
    contest.add_argument("--base", choices=BASES, default=SMOLLM2.name, help="base model that is steered")
    contest.add_argument("--only", default="", help="regular expression for TASK-METHOD; by default all")
    contest.add_argument("--lm", default="", help="folder of TinyLlama-1.1B-Chat, for another perplexity")
    contest.add_argument("--shipped", action="store_true", help="test the sentiment model that radq ships")
    contest.add_argument("--memory", type=float, default=gpu_memory(), help="GB that commands take together")
    found = parser.parse_args()
    if len(found.files) != FILES.get(found.piece, 0):
        parser.error(f"{found.piece} takes {FILES.get(found.piece, 0)} files, not {len(found.files)}.")
    given = [
        name
        for name in ("base", "only", "lm", "shipped", "memory")
        if getattr(found, name) != contest.get_default(name)
    ]
    if given and found.piece not in CONTEST_PIECES:
        parser.error(f"--{given[0]} is for the pieces {' and '.join(CONTEST_PIECES)}, not for {found.piece}.")
    return found


def main() -> None:
    arguments = vars(parse_arguments())
    arguments["folder"].mkdir(parents=True, exist_ok=True)
    os.chdir(arguments["folder"])
    piece, arguments["base"] = arguments["piece"], BASES[arguments["base"]]
    request = Request(**{field.name: arguments[field.name] for field in fields(Request)})
    if piece in CONTEST_PIECES:
        request.check()
    began = time.time()
    PIECES[piece](request)
    if piece not in FILES:
        record_piece(piece, time.time() - began, arguments["commit"])


if __name__ == "__main__":
    try:
        main()
    except RadqError as error:
        sys.exit(f"error: {error}")
