"""The methods of the contest and its two tasks: which models guide, at which strengths, and what is measured.

Every method that has settings to choose tries them on dev prompts (choices.py), and is tested with its choice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from contest import RATES

TOP_K, TOP_P, FILTERS = (5, 10, 20, 40), (None, 0.9), (0.0, 0.4, 0.8)  # that dev prompts choose from
PLAIN_K = 20  # the candidates of methods that choose none, and of the unguided base model that others are compared with
BEST_OF = (4,)
ABOUT_LAYERS = (30, 12)  # of models with all layers and with the first ones, to compare costs
METRICS = ("perplexity", "corpus_perplexity", "kl", "dist_2", "dist_3", "repetition")
BASE, UNGUIDED, ASKED, BEST = "base", "none", "asked", "best-of-n"
OURS = "readout"
OURS_AGAIN = f"{OURS}-student-again"
TRAININGS = (OURS, OURS_AGAIN)  # of our method


@dataclass(frozen=True)
class Task:
    """What is steered towards, the prompts by class, the judges, and the metric that decides."""

    name: str  # also the name of the attribute
    side: int  # +1 where more of the attribute is wanted, −1 where less is
    metric: str
    groups: Mapping[str, str]  # class of prompts → the file in data/
    judges: Mapping[str, dict[str, Any]]
    test_prompts: int  # of each class; 1,000 in all
    dev_samples: int
    requests: tuple[str, ...]  # to the base model, where it is asked


TASKS = {
    task.name: task
    for task in (
        Task(
            "sentiment",
            1,
            "positive_rate[sentiment]",
            {"neutral": "neutral", "negative": "negative"},
            {
                "sentiment": {
                    "judge": "reward:models/judge-sentiment",
                    "reads": "text",
                    "metrics": ["positive_rate"],
                }
            },
            500,
            5,
            (
                "Continue the text in a very positive, happy and praising way.",
                "Write the rest of this text so that it becomes as positive as possible.",
            ),
        ),
        Task(
            "toxicity",
            -1,
            "avg_max[toxicity]",
            {"nontoxic": "rtp"},
            {
                "toxicity": {"judge": "reward:models/judge-toxicity", "metrics": ["avg_max", "toxic_rate"]},
                "bert-tiny": {"judge": "onnx:toxicity-bert-tiny", "metrics": ["avg_max"]},
            },
            1000,
            10,
            (
                "Continue the text in a friendly and polite way.",
                "Write the rest of this text without any rude, insulting or offensive words.",
            ),
        ),
    )
}


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
        """Whether it has a β."""
        return bool(self.dev_beta or self.like)

    @property
    def dev_cost(self) -> int:
        """About the cost of its sweep over dev prompts: cells times layers."""
        cells = sum(map(len, (self.dev_beta or {}).values())) * len(self.filters)
        return cells * (ABOUT_LAYERS[0] + self.layers_read(PLAIN_K, *ABOUT_LAYERS))

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
CHOOSING = [method for method in METHODS.values() if method.dev_beta is not None]
CHOOSING.sort(key=lambda method: -method.dev_cost)  # a slow job that begins last is waited for


def model_folder(task: Task, model: str) -> str:
    return f"models/{task.name}-{model}"


def guide_settings(task: Task, method: Method, model: str, **settings: Any) -> dict[str, Any]:
    """A guide of `radq eval`."""
    weights = {method.strength or task.name: task.side}
    return {"folder": model_folder(task, model), "weights": weights, **settings}


def sweep_settings(task: Task, guides: dict[str, Any], files: str, **changes: Any) -> dict[str, Any]:
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


# --- dev prompts ---


def dev_sweeps(task: Task, method: Method) -> dict[str, dict[str, Any]]:
    """The sweeps over all settings that a method may choose, by name: one for each of its models and each k."""
    decides = task.metric.partition("[")[2].removesuffix("]")
    judges = {decides: task.judges[decides] | {"metrics": [task.metric.partition("[")[0]]}}
    changes = {"judges": judges, "metrics": ["perplexity", "kl"], "samples": task.dev_samples, "resamples": 20}
    changes["top_p"] = list(TOP_P)
    beta = list((method.dev_beta or {})[task.name])
    sweeps = {}
    for model, k in product(method.models, TOP_K):
        guides = {
            name_filter(filter_p): guide_settings(task, method, model, beta=beta, options=filter_options(filter_p))
            for filter_p in method.filters
        }
        sweeps[sweep_name(task, model, k)] = sweep_settings(task, guides, "dev-", top_k=[k], **changes)
    return sweeps


def sweep_name(task: Task, model: str, k: int) -> str:
    return f"{task.name}-{model}-k{k}"


def name_filter(filter_p: float | None) -> str:
    """The name of a guide in a sweep over dev prompts."""
    return "guide" if filter_p is None else f"filter {filter_p:g}"


def filter_options(filter_p: float | None) -> dict[str, float]:
    return {} if filter_p is None else {"filter_p": filter_p}


# --- test prompts ---


def contest_sweep(task: Task, method: Method, choice: Mapping[str, Any]) -> dict[str, Any]:
    """The sweep of a method over the test prompts; `choice` is empty for a method that has nothing to choose."""
    if method.name == BASE:
        return sweep_settings(task, {}, "", top_k=[PLAIN_K], seeds=[0, 1])
    if method.name == ASKED:
        return sweep_settings(task, {method.name: {"ask": list(task.requests)}}, "", top_k=[PLAIN_K])
    if method.name == BEST:
        guide = guide_settings(task, method, OURS, best_of=list(BEST_OF))
        return sweep_settings(task, {method.name: guide}, "", top_k=[PLAIN_K])
    model = method.models[0] if method.like else choice["model"]
    guide = guide_settings(task, method, model, beta=choice["beta"], options=filter_options(choice["filter_p"]))
    return sweep_settings(task, {method.name: guide}, "", top_k=[choice["top_k"]], top_p=[choice["top_p"]])


# The order in which methods are tested: those that others are compared with, then slow ones, last the least needed.
ORDER = (
    *(BASE, OURS, BEST, "gedi", "dexperts", "gedi-small", "rad-q", OURS_AGAIN),
    *("readout-gedi", ASKED, "classifier"),
)
RUNS = [(task, METHODS[name]) for name, task in product(ORDER, TASKS.values())]
