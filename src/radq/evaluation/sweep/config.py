"""A sweep: prompts × guides × β × candidates × seeds, from one YAML file; what is to be done, and in which order.

    base: gpt2-large
    prompts: [{file: rtp.jsonl.gz, max_toxicity: 0.5, limit: 1000}]
    guides:
      rad-q: {folder: runs/detox-q, weights: {toxicity: -1}, beta: [10, 20, 50]}
      dexperts: {folder: runs/experts, weights: {alpha: 1}, beta: [1, 2]}
      best-of-n: {folder: runs/detox-q, weights: {toxicity: -1}, best_of: [5, 10]}
    judges:
      toxicity: {judge: "onnx:toxicity-bert-tiny", metrics: [avg_max, toxic_rate]}
    perplexity: gpt2-xl
    metrics: [perplexity, dist_2, dist_3]

The unguided base is always there, as the guide `none`.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from radq.data.prompts import Prompt, read_prompts
from radq.errors import OptionError
from radq.evaluation.metrics import METRICS, Bootstrap, check_metric

UNGUIDED = "none"
WHILE_DECODING = "base"  # perplexity under the base, from the logits that each token was chosen by


@dataclass(frozen=True)
class PromptFile:
    """See `read_prompts`."""

    file: str
    group: str | None = None
    limit: int | None = None
    seed: int | None = None
    max_toxicity: float | None = None


@dataclass(frozen=True)
class GuideSweep:
    """A guide at several strengths.

    Args:
        folder: a reward model, or the experts of DExperts or GeDi, as `radq generate --guide` takes them.
        weights: what β = 1 means: {toxicity: -1}, {alpha: 1}, {omega: 1}.
        beta: the strengths.
        options: numbers that stay the same, such as GeDi's filter_p.
        clamp: clamp rewards to the range of the training responses.
        best_of: in place of β: keep the best of so many unguided samples, by the reward at their end.
    """

    folder: str
    weights: dict[str, float]
    beta: list[float] = field(default_factory=list)
    options: dict[str, float] = field(default_factory=dict)
    clamp: bool = True
    best_of: list[int] = field(default_factory=list)

    @property
    def strengths(self) -> list[float]:
        return [float(strength) for strength in self.beta or self.best_of]

    def numbers(self, strength: float) -> dict[str, float]:
        return {name: weight * strength for name, weight in self.weights.items()} | self.options


@dataclass(frozen=True)
class JudgeUse:
    """A judge (see `radq.evaluation.judges.base`), what it reads, and the metrics of its scores."""

    judge: str
    metrics: list[str]
    reads: Literal["continuation", "text"] = "continuation"


@dataclass(frozen=True)
class Sweep:
    base: str
    prompts: list[PromptFile]
    guides: dict[str, GuideSweep] = field(default_factory=dict)
    judges: dict[str, JudgeUse] = field(default_factory=dict)
    metrics: list[str] = field(default_factory=lambda: ["dist_2", "dist_3"])
    perplexity: str | None = None  # language model that measures it; `base`: the base does, as it decodes
    mauve: str | None = None  # encoder of its features
    samples: int = 25
    max_new_tokens: int = 20
    temperature: float = 1.0
    top_k: list[int | None] = field(default_factory=lambda: [20])
    top_p: list[float | None] = field(default_factory=lambda: [None])
    kl_budget: list[float | None] = field(default_factory=lambda: [None])
    seeds: list[int] = field(default_factory=lambda: [0])
    batch_size: int = 100  # texts decoded together
    resamples: int = 1000  # of the prompts, for the intervals
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    engine: Literal["transformers", "vllm"] = "transformers"
    vllm: dict[str, Any] = field(default_factory=dict)  # options of vllm.LLM, such as gpu_memory_utilization

    def __post_init__(self) -> None:
        _check(self)

    @property
    def prompts_per_chunk(self) -> int:
        """A chunk is written as a whole: four batches, which are sorted by length for little padding."""
        return max(1, 4 * self.batch_size // self.samples)

    def cells(self) -> list["Cell"]:
        """Guide by guide, so that each is loaded once; the unguided base comes first."""
        settings = list(product(self.top_k, self.top_p, self.kl_budget, self.seeds))
        unguided = dict.fromkeys(Cell(UNGUIDED, None, k, p, None, seed) for k, p, _, seed in settings)
        guided = (
            Cell(name, strength, k, p, kl, seed)
            for name, guide in self.guides.items()
            for (k, p, kl, seed), strength in product(settings, guide.strengths)
        )
        return [*unguided, *guided]

    def read_prompts(self) -> list[Prompt]:
        return [
            prompt
            for part in self.prompts
            for prompt in read_prompts(part.file, part.group, part.limit, part.seed, part.max_toxicity)
        ]


@dataclass(frozen=True)
class Cell:
    """One setting of the sweep. Its name is its key in all files of the run."""

    guide: str
    beta: float | None  # n for the best of n
    top_k: int | None
    top_p: float | None
    kl_budget: float | None
    seed: int

    @property
    def name(self) -> str:
        numbers = {"β": self.beta, "k": self.top_k, "p": self.top_p, "kl": self.kl_budget, "seed": self.seed}
        return " ".join([self.guide, *(f"{name}={value:g}" for name, value in numbers.items() if value is not None)])

    @property
    def reference(self) -> "Cell":
        """The unguided cell it is compared with."""
        return Cell(UNGUIDED, None, self.top_k, self.top_p, None, self.seed)


# --- from and to YAML ---


def load_sweep(file: str | Path) -> Sweep:
    try:
        stored = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"cannot read {str(file)!r}: {str(error).splitlines()[0]}.", "give a YAML file.") from error
    return _build(Sweep, stored, str(file))


def dump_sweep(sweep: Sweep) -> str:
    return yaml.safe_dump(asdict(sweep), sort_keys=False, allow_unicode=True)


def fingerprint(prompts: list[Prompt]) -> str:
    return hashlib.sha256(json.dumps([[prompt.text, prompt.group] for prompt in prompts]).encode()).hexdigest()


def find_changes(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """What differs between two sweeps, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from find_changes(old.get(name), new.get(name), f"{place}.{name}".strip("."))
    elif old != new:
        yield f"{place}: {json.dumps(old, ensure_ascii=False)} → {json.dumps(new, ensure_ascii=False)}"


def _build(kind: Any, stored: Any, place: str) -> Any:
    """A dataclass from what YAML gives; an error names the place."""
    if not isinstance(stored, dict):
        raise OptionError(f"{place} is {stored!r}.", f"it takes {', '.join(f.name for f in fields(kind))}.")
    known = {option.name: option for option in fields(kind)}
    unknown = [name for name in stored if name not in known]
    if unknown:
        raise OptionError(f"{place} sets {unknown[0]!r}, which is no option.", f"there are {', '.join(known)}.")
    for name, option in known.items():
        if name not in stored and option.default is MISSING and option.default_factory is MISSING:
            raise OptionError(f"{place} has no {name!r}.", "see docs/evaluation.md for a whole sweep.")
    values = {name: _convert(known[name].type, value, f"{place}: {name}") for name, value in stored.items()}
    return kind(**values)


def _convert(wanted: Any, value: Any, place: str) -> Any:
    """Into the type of a field: lists may be given as a single item, numbers as text such as 1e-4."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return value
    if wanted in (PromptFile, GuideSweep, JudgeUse):
        return _build(wanted, value, place)
    if origin is list:
        items = value if isinstance(value, list) else [value]
        return [_convert(inner[0], item, place) for item in items]
    if origin is dict:
        if not isinstance(value, dict):
            raise OptionError(f"{place} is {value!r}.", "give names with their values.")
        return {str(name): _convert(inner[1], item, f"{place}: {name}") for name, item in value.items()}
    if origin is Literal:
        if value not in inner:
            raise OptionError(f"{place} is {value!r}.", f"choose one of {', '.join(inner)}.")
        return value
    if value is None and type(None) in inner:
        return None
    target = next((kind for kind in inner if kind is not type(None)), wanted)
    try:
        if (target is bool) != isinstance(value, bool) or isinstance(value, (list, dict)) or value is None:
            raise ValueError
        if target is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        return target(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"{place} is {value!r}.", f"give {_WORDS[target]}.") from error


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _check(sweep: Sweep) -> None:
    for name in ("samples", "max_new_tokens", "batch_size"):
        if getattr(sweep, name) < 1:
            raise OptionError(f"{name} is {getattr(sweep, name)}.", "give 1 or more.")
    Bootstrap(sweep.resamples)  # which refuses numbers that make no sense
    for name in ("prompts", "top_k", "top_p", "kl_budget", "seeds"):
        if not getattr(sweep, name):
            raise OptionError(f"{name} is empty.", "give one or more.")
    for budget in sweep.kl_budget:
        if budget is not None and not 0 <= budget < float("inf"):
            raise OptionError(f"kl_budget is {budget}.", "give 0 or more nats per token, or null for no limit.")
    for name, guide in sweep.guides.items():
        if name == UNGUIDED or not re.fullmatch(r"[\w.+() -]+", name):
            raise OptionError(f"a guide is called {name!r}.", f"use letters, digits and .+()-, and not {UNGUIDED!r}.")
        if bool(guide.beta) == bool(guide.best_of):
            raise OptionError(
                f"guide {name!r} has {guide.strengths or 'no strengths'}.", "give either beta or best_of."
            )
        if guide.best_of and (min(guide.best_of) < 1 or guide.options):
            raise OptionError(f"guide {name!r} keeps the best of {guide.best_of}.", "give 1 or more, and no options.")
    judged = [(name, metric) for name, judge in sweep.judges.items() for metric in judge.metrics]
    for name, metric in [*judged, *(("metrics", metric) for metric in sweep.metrics)]:
        check_metric(metric)
        if ("scores" in METRICS[metric].needs) != (name in sweep.judges):
            raise OptionError(
                f"{metric!r} stands under {name!r}.", "metrics of scores belong to a judge, the others to metrics."
            )
    needs = {"perplexity": ("perplexity", "corpus_perplexity"), "mauve": ("mauve",)}
    for model, names in needs.items():
        asked = [name for name in names if name in sweep.metrics]
        if asked and getattr(sweep, model) is None:
            raise OptionError(f"{asked[0]} has no model to measure it.", f"name one under {model!r}.")
    if sweep.perplexity == WHILE_DECODING and sweep.engine != "transformers":
        raise OptionError("perplexity is 'base'.", f"name the model for the engine {sweep.engine}.")
