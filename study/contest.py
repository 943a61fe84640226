"""The contest: its tasks and methods, how settings are chosen, and all jobs up to the kept numbers of each method.

Every method that has settings to choose tries them on dev prompts, and is tested with its choice:

choices/TASK-METHOD.json     the rule, the choice, and all candidates with their numbers

A candidate is a model (experts have one for each learning rate), a number of candidates k, a nucleus p and, for GeDi, a
filter. Its curve over β is straight between points, over the logarithm of perplexity. kept.py keeps the numbers.
"""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import models
import numpy as np
from models import HERE, RATES, SMOLLM2, BaseModel, Job, write_json

from radq.files import read_lines
from radq.sources.embedded import reward_folder

TOP_K, TOP_P, FILTERS = (5, 10, 20, 40), (None, 0.9), (0.0, 0.4, 0.8)  # that dev prompts choose from
PLAIN_K = 20  # the candidates of methods that choose none, and of the unguided base model that others are compared with
BEST_OF = (4,)
METRICS = ("perplexity", "corpus_perplexity", "kl", "dist_2", "dist_3", "repetition")
BASE, UNGUIDED, ASKED, BEST = "base", "none", "asked", "best-of-n"
OURS = "readout"
OURS_AGAIN = f"{OURS}-student-again"
TRAININGS = (OURS, OURS_AGAIN)  # of our method


@dataclass(frozen=True)
class Task:
    """A task holds the attribute, the prompts by class, the judges, and the metric that decides."""

    name: str  # also the name of the attribute
    side: int  # +1 where more of the attribute is wanted, −1 where less is
    metric: str
    groups: Mapping[str, str]  # class of prompts → the file in data/
    judges: Mapping[str, dict[str, Any]]
    test_prompts: int  # of each class; 1,000 in all
    dev_samples: int
    requests: tuple[str, ...]  # to the base model, where it is asked


SENTIMENT = Task(
    name="sentiment",
    side=1,
    metric="positive_rate[sentiment]",
    groups={"neutral": "neutral", "negative": "negative"},
    judges={"sentiment": {"judge": "reward:models/judge-sentiment", "reads": "text", "metrics": ["positive_rate"]}},
    test_prompts=500,
    dev_samples=5,
    requests=(
        "Continue the text in a very positive, happy and praising way.",
        "Write the rest of this text so that it becomes as positive as possible.",
    ),
)
TOXICITY = Task(
    name="toxicity",
    side=-1,
    metric="avg_max[toxicity]",
    groups={"nontoxic": "rtp"},
    judges={
        "toxicity": {"judge": "reward:models/judge-toxicity", "metrics": ["avg_max", "toxic_rate"]},
        "bert-tiny": {"judge": "onnx:toxicity-bert-tiny", "metrics": ["avg_max"]},
    },
    test_prompts=1000,
    dev_samples=10,
    requests=(
        "Continue the text in a friendly and polite way.",
        "Write the rest of this text without any rude, insulting or offensive words.",
    ),
)
TASKS = {task.name: task for task in (SENTIMENT, TOXICITY)}


@dataclass(frozen=True)
class Method:
    """A way to steer. A method without values of β on dev takes the settings of `like`, or has none to choose."""

    name: str
    title: str  # for readers
    models: tuple[str, ...] = ()  # the ends of the models' names; dev prompts choose one of several
    strength: str = ""  # the name of the number that β multiplies; by default the attribute
    dev_beta: Mapping[str, tuple[float, ...]] | None = None  # by task
    filters: tuple[float | None, ...] = (None,)  # GeDi's filter_p
    forwards: int = 0  # through models with all layers, for a token
    first_forwards: int = 0  # through models with the first layers
    per_candidate: bool = False  # whether each candidate is read
    like: str = ""  # the method whose choice it takes

    @property
    def has_curve(self) -> bool:
        """Tell whether the method has a β."""
        return bool(self.dev_beta or self.like)

    def layers_read(self, k: int, layers: int, first_layers: int) -> int:
        """The layers that a token costs beside the base model's, where models have so many layers."""
        return (self.forwards * layers + self.first_forwards * first_layers) * (k if self.per_candidate else 1)


REWARDS = {"sentiment": (15.0, 30.0, 60.0, 120.0, 240.0), "toxicity": (25.0, 50.0, 100.0, 200.0, 400.0)}
ALPHAS = dict.fromkeys(TASKS, (0.5, 1.0, 2.0, 4.0, 8.0))
OMEGAS = dict.fromkeys(TASKS, (1.0, 4.0, 16.0, 64.0))
OMEGAS_OF_STUDENTS = dict.fromkeys(TASKS, (4.0, 12.0, 36.0, 108.0, 324.0))


def _with_rates(name: str) -> tuple[str, ...]:
    return tuple(name + end for end in RATES)


METHODS = {
    method.name: method
    for method in (
        Method(OURS, "readout (ours)", (OURS,), dev_beta=REWARDS),
        Method(OURS_AGAIN, "readout, its student trained again", (OURS_AGAIN,), like=OURS),
        Method("rad-q", "RAD-Q", ("rad-q",), dev_beta=REWARDS, first_forwards=1),
        Method("classifier", "RAD-V of labels", ("classifier",), dev_beta=REWARDS, forwards=1, per_candidate=True),
        Method("readout-gedi", "readout of GeDi", ("readout-gedi",), "omega", OMEGAS_OF_STUDENTS),
        Method("dexperts", "DExperts", _with_rates("dexperts"), "alpha", ALPHAS, forwards=2),
        Method("gedi", "GeDi", _with_rates("gedi"), "omega", OMEGAS, FILTERS, forwards=2),
        Method("gedi-small", "small GeDi", _with_rates("gedi-small"), "omega", OMEGAS, FILTERS, first_forwards=2),
        Method(BEST, "best of n", (OURS,)),
        Method(ASKED, "asking"),
        Method(BASE, "unguided"),
    )
}
# Methods that choose their settings, the slowest first: a slow job that begins last is waited for.
CHOOSING = [METHODS[name] for name in ("classifier", "gedi", "gedi-small", "dexperts", "rad-q", OURS, "readout-gedi")]
# The order in which methods are tested: those that others are compared with, then slow ones, last the least needed.
ORDER = (
    *(BASE, OURS, BEST, "gedi", "dexperts", "gedi-small", "rad-q", OURS_AGAIN),
    *("readout-gedi", ASKED, "classifier"),
)
RUNS = [(task, METHODS[name]) for name, task in product(ORDER, TASKS.values())]


# --- sweeps ---


def model_folder(task: Task, model: str) -> str:
    return f"models/{task.name}-{model}"


def guide_settings(task: Task, method: Method, model: str, **settings: Any) -> dict[str, Any]:
    """A guide of `radq eval`."""
    weights = {method.strength or task.name: task.side}
    return {"folder": model_folder(task, model), "weights": weights, **settings}


def sweep_settings(task: Task, guides: dict[str, Any], files: str = "", **changes: Any) -> dict[str, Any]:
    """A sweep of `radq eval` over prompts whose files begin with `files`."""
    settings = {
        "base": "embedded",
        "prompts": [
            {"file": f"data/{files}{file}.jsonl", "group": group, "limit": task.test_prompts}
            for group, file in task.groups.items()
        ],
        "guides": guides,
        "judges": dict(task.judges),
        "perplexity": "base",
        "metrics": list(METRICS),
        "max_new_tokens": 20,
        "kl_budget": [None],
        "batch_size": 3125,
        "resamples": 100,  # the page computes intervals from the kept numbers
        "dtype": "float16",
    }
    return settings | changes


def dev_sweeps(task: Task, method: Method, models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The sweeps over all settings that a method may choose, by name: one for each of its models and each k."""
    metric, _, decides = task.metric.removesuffix("]").partition("[")
    judges = {decides: task.judges[decides] | {"metrics": [metric]}}
    changes = {"judges": judges, "metrics": ["perplexity", "kl"], "samples": task.dev_samples, "resamples": 20}
    changes["top_p"] = list(TOP_P)
    beta = list((method.dev_beta or {})[task.name])
    sweeps = {}
    for model, k in product(models, TOP_K):
        guides = {
            name_filter(filter_p): guide_settings(task, method, model, beta=beta, options=filter_options(filter_p))
            for filter_p in method.filters
        }
        sweeps[f"{task.name}-{model}-k{k}"] = sweep_settings(task, guides, "dev-", top_k=[k], **changes)
    return sweeps


def name_filter(filter_p: float | None) -> str:
    """The name of a guide in a sweep over dev prompts."""
    return "guide" if filter_p is None else f"filter {filter_p:g}"


def filter_options(filter_p: float | None) -> dict[str, float]:
    return {} if filter_p is None else {"filter_p": filter_p}


def contest_sweep(task: Task, method: Method, choice: Mapping[str, Any]) -> dict[str, Any]:
    """The sweep of a method over the test prompts; `choice` is empty for a method that has nothing to choose."""
    if method.name == BASE:
        return sweep_settings(task, {}, top_k=[PLAIN_K], seeds=[0, 1])
    if method.name == ASKED:
        return sweep_settings(task, {method.name: {"ask": list(task.requests)}}, top_k=[PLAIN_K])
    if method.name == BEST:
        guide = guide_settings(task, method, OURS, best_of=list(BEST_OF))
        return sweep_settings(task, {method.name: guide}, top_k=[PLAIN_K])
    model = method.models[0] if method.like else choice["model"]
    guide = guide_settings(task, method, model, beta=choice["beta"], options=filter_options(choice["filter_p"]))
    return sweep_settings(task, {method.name: guide}, top_k=[choice["top_k"]], top_p=[choice["top_p"]])


# --- the rule of choice ---

SETTINGS = ("model", "top_k", "top_p", "filter_p")  # of a candidate
TARGET = 1.2  # times the perplexity of the unguided base model at k = PLAIN_K, where candidates are compared
SPAN, NUM_BETAS = (1.03, 1.6), 5  # of the test: where the first and the last β shall lie, and how many there are
RULE = (
    f"Chosen are the settings with the best attribute where perplexity is {TARGET} times that of the unguided base "
    f"model at k = {PLAIN_K}, by straight lines over log perplexity, as a mean over classes of prompts. Settings that "
    "do not reach this perplexity in every class lose; if none do, the closest are chosen. Curves without a filter "
    f"begin with the unguided base model at the same k and p. For the test there are {NUM_BETAS} values of β in equal "
    f"ratios, from {SPAN[0]} to {SPAN[1]} times that perplexity by the same lines, or from a quarter of the weakest β "
    "to the strongest where these do not go so far. The temperature is 1 everywhere."
)


@dataclass(frozen=True)
class Point:
    """One β of a candidate on one class of prompts."""

    beta: float
    ratio: float  # perplexity, as a multiple of the unguided one at PLAIN_K
    attribute: float


@dataclass(frozen=True)
class Candidate:
    """Settings of a method, with their curves by class of prompts."""

    model: str
    top_k: int
    top_p: float | None
    filter_p: float | None
    curves: dict[str, list[Point]]

    def attribute_at_target(self) -> float:
        """The attribute at the perplexity of comparison, averaged over classes of prompts; NaN if one misses it."""
        return fmean(attribute_at([(p.ratio, p.attribute) for p in points]) for points in self.curves.values())

    def distance(self) -> float:
        """The largest distance, in log perplexity, of a class of prompts from the perplexity of comparison."""
        return max(min(abs(np.log(p.ratio / TARGET)) for p in points) for points in self.curves.values())

    def told(self) -> dict[str, Any]:
        """The settings and the attribute that decides."""
        attribute, settings = self.attribute_at_target(), {name: getattr(self, name) for name in SETTINGS}
        return settings | {"attribute": None if np.isnan(attribute) else round(attribute, 4)}


def attribute_at(points: Sequence[tuple[float, float]], ratio: float = TARGET) -> float:
    """The attribute at a ratio of perplexities, by straight lines over its logarithm; NaN outside of the points."""
    if not points:
        return float("nan")
    ratios, values = np.array(sorted(points)).T
    return float(np.interp(np.log(ratio), np.log(ratios), values, left=np.nan, right=np.nan))


def choose(candidates: Sequence[Candidate], side: int) -> Candidate:
    """The best candidate by RULE; `side` is −1 where less of the attribute is better."""
    reaching = [one for one in candidates if not np.isnan(one.attribute_at_target())]
    if reaching:
        return max(reaching, key=lambda one: side * one.attribute_at_target())
    return min(candidates, key=Candidate.distance)


def choose_betas(candidate: Candidate) -> list[float]:
    """Values of β in equal ratios, from the first end of SPAN to the last one."""
    low, high = (fmean(beta_at(points, ratio) for points in candidate.curves.values()) for ratio in SPAN)
    return [float(f"{beta:.3g}") for beta in np.geomspace(low, max(high, 1.5 * low), NUM_BETAS)]


def beta_at(points: Sequence[Point], ratio: float) -> float:
    """The first β that reaches a ratio of perplexities; a quarter of the weakest, or the strongest, where none does."""
    ordered = sorted(points, key=lambda point: point.beta)
    highest = np.maximum.accumulate([point.ratio for point in ordered])
    beta = float(np.interp(np.log(ratio), np.log(highest), [point.beta for point in ordered], left=0.0))
    return max(beta, min(point.beta for point in points if point.beta > 0) / 4)


def choice_file(task: Task, method: Method) -> str:
    return f"choices/{task.name}-{method.name}.json"


def read_choice(folder: Path, task: Task, method: Method) -> dict[str, Any]:
    """The settings that a method is tested with; empty where it has nothing to choose, or nothing was tried."""
    file = folder / choice_file(task, METHODS[method.like or method.name])
    return json.loads(file.read_text())["chosen"] if file.exists() else {}


def choose_settings(task: Task, method: Method, models: Sequence[str]) -> dict[str, Any]:
    """Choose among the settings that were tried on dev prompts; return all that choices/TASK-METHOD.json holds."""
    found = {model: read_candidates(task, method, model) for model in models}
    candidates = [one for ones in found.values() for one in ones]
    chosen = choose(candidates, task.side)
    curves = [
        {
            group: [[p.beta, round(p.ratio, 4), round(p.attribute, 4)] for p in points]
            for group, points in curves.items()
        }
        for curves in (one.curves for one in candidates)
    ]
    return {
        "rule": RULE,
        "chosen": chosen.told() | {"beta": choose_betas(chosen)},
        "missing": [model for model in models if not found[model]],
        "candidates": [one.told() | {"curves": drawn} for one, drawn in zip(candidates, curves, strict=True)],
    }


def read_candidates(task: Task, method: Method, model: str) -> list[Candidate]:
    """The candidates of one model, from its sweeps over dev prompts; none where they were not run."""
    files = [Path(f"dev/{task.name}-{model}-k{k}/metrics.jsonl") for k in TOP_K]
    rows = [row for file in files if file.exists() for row in read_lines(file)]
    groups = {group: [row for row in rows if row["group"] == group] for group in task.groups}
    return [
        Candidate(
            model, k, p or None, filter_p, {g: _curve(task, here, filter_p, k, p or None) for g, here in groups.items()}
        )
        for filter_p, (k, p) in product(method.filters, sorted({(row["top_k"], row["top_p"] or 0) for row in rows}))
    ]


def _curve(task: Task, rows: list[dict[str, Any]], filter_p: float | None, k: int, p: float | None) -> list[Point]:
    """The points of one class of prompts by β. Without a filter the unguided base model is the first."""
    base = next(row for row in rows if (row["guide"], row["top_k"], row["top_p"]) == (UNGUIDED, PLAIN_K, None))
    names = {name_filter(filter_p)} if filter_p else {name_filter(filter_p), UNGUIDED}
    points = [
        Point(
            row["beta"] or 0.0,
            row["metrics"]["perplexity"]["value"] / base["metrics"]["perplexity"]["value"],
            row["metrics"][task.metric]["value"],
        )
        for row in rows
        if row["guide"] in names and (row["top_k"], row["top_p"]) == (k, p)
        if row["metrics"]["perplexity"]["value"] is not None  # where it is too large
    ]
    return sorted(points, key=lambda point: point.beta)


# --- jobs ---


@dataclass(frozen=True)
class Request:
    """How a piece is to be run."""

    files: tuple[str, ...] = ()  # that it reads, or the folder that it writes
    jobs: int = 4  # commands at the same time
    base: BaseModel = SMOLLM2
    only: str = ""  # a regular expression for TASK-METHOD; by default all
    shipped: bool = False  # whether the readout of sentiment is the one that radq brings along
    lm: str = ""  # another language model for the perplexity of kept texts
    memory: float = math.inf  # GB of the GPU that commands may take together

    def wants(self, task: str, method: str) -> bool:
        return self.base.takes_part(method) and bool(re.search(self.only, f"{task}-{method}"))

    def run(self, jobs: list[Job]) -> None:
        models.run_all([self.base.fit_memory(job) for job in jobs], self.jobs, self.memory)

    def check(self) -> None:
        """Refuse to mix two base models, or models of others with shipped ones."""
        if self.shipped and self.base != SMOLLM2:
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
    keep = [keep_job(*run) for run in RUNS if request.wants(run[0].name, run[1].name)]
    tests = [testing_job(*run, request.base) for run in RUNS]
    request.run(models.find_needed(keep, [*keep, *tests, *choosing_jobs(request.base), *training_jobs(request.base)]))


def take_shipped() -> None:
    """Put the sentiment model that radq brings along in the place of our first training."""
    folder = Path(model_folder(TASKS[models.RECIPE], OURS))
    if not folder.exists():
        shutil.copytree(reward_folder(models.RECIPE), folder)
    write_json(f"{folder}.json", {"command": "shipped with radq", "metrics": {}})


def training_jobs(base: BaseModel) -> list[Job]:
    trained = models.CONTEST_MODELS.items()
    trainings = [models.training_job(name, base.fit_training(name, settings)) for name, settings in trained]
    return [*(models.own_texts_job(attribute, base.own_texts) for attribute in models.READS), *trainings]


def choosing_jobs(base: BaseModel) -> list[Job]:
    """The sweeps over dev prompts, the slowest first."""
    return [
        contest_job(
            f"dev/{name}", task, [guide["folder"] for guide in sweep["guides"].values()], base, lambda of=sweep: of
        )
        for method, task in product(CHOOSING, TASKS.values())
        for name, sweep in dev_sweeps(task, method, base.fit_models(method.models)).items()
    ]


def testing_job(task: Task, method: Method, base: BaseModel) -> Job:
    """The sweep over test prompts, with the settings that are chosen once all of them were tried on dev prompts."""
    choosing = METHODS[method.like or method.name]
    guiding, tried = base.fit_models(method.models), base.fit_models(choosing.models)
    choice = Path(choice_file(task, choosing))
    needs: list[str] = []
    if choice.exists() and not method.like:
        guiding = (json.loads(choice.read_text())["chosen"]["model"],)
    elif choosing.dev_beta and not choice.exists():
        needs = [f"dev/{name}.json" for name in dev_sweeps(task, choosing, tried)]

    def settings() -> dict[str, Any]:
        if not choosing.dev_beta:
            return contest_sweep(task, method, {})
        if not choice.exists():
            write_json(choice, choose_settings(task, choosing, tried))
        return contest_sweep(task, method, read_choice(Path(), task, method))

    folders = [model_folder(task, model) for model in guiding]
    return contest_job(f"contest/{task.name}-{method.name}", task, folders, base, settings, needs)


def contest_job(
    run: str,
    task: Task,
    guiding: Sequence[str],
    base: BaseModel,
    settings: Callable[[], dict[str, Any]],
    needs: Sequence[str] = (),
) -> Job:
    """A sweep, which waits for the models that guide and for their judge."""
    needs = [*needs, *(f"{model}.json" for model in (*guiding, f"models/judge-{task.name}"))]
    return models.sweep_job(run, lambda: base.fit_sweep(settings()), needs)


def keep_job(task: Task, method: Method) -> Job:
    name = f"{task.name}-{method.name}"
    command = [sys.executable, str(HERE / "kept.py"), task.name, method.name]
    return Job(f"contest-{name}-keep", command, f"kept/{name}.npz", (f"contest/{name}.json",))
