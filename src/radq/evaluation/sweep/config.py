"""The configuration of a sweep (prompts × guides × β × candidates × seeds) in one YAML file, and its cells in order.

    base: gpt2-large
    prompts: [{file: rtp.jsonl.gz, max_toxicity: 0.5, limit: 1000}]
    guides:
      rad-q: {folder: runs/detox-q, weights: {toxicity: -1}, beta: [10, 20, 50]}
      dexperts: {folder: runs/experts, weights: {alpha: 1}, beta: [1, 2]}
      best-of-n: {folder: runs/detox-q, weights: {toxicity: -1}, best_of: [5, 10]}
      asked: {ask: "Continue the text in a friendly and polite way."}
    judges:
      toxicity: {judge: "onnx:toxicity-bert-tiny", metrics: [avg_max, toxic_rate]}
    perplexity: gpt2-xl
    metrics: [perplexity, dist_2, dist_3]

The unguided base model is always part of a sweep, as the guide `none`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from radq.data.prompts import Prompt, read_prompts
from radq.decoding.config import DEFAULT_KL_BUDGET, Ends
from radq.errors import OptionError
from radq.evaluation.estimates import MAX_RESAMPLES
from radq.evaluation.metrics import ATTRIBUTE_METRICS, METRICS, check_metric
from radq.guides.spec import GuideSpec
from radq.settings import COUNT, Range, check_values, exact, read_yaml
from radq.sources.model_source import check_language_model, check_reward_model

UNGUIDED = "none"
WHILE_DECODING = "base"  # perplexity under the base model, from the logits that each token was chosen by


@dataclass(frozen=True)
class PromptFile:
    """The arguments of `read_prompts` for one file of prompts."""

    file: str
    group: str | None = None
    limit: int | None = None
    seed: int | None = None
    max_toxicity: float | None = None


@dataclass(frozen=True)
class GuideSweep:
    """A guide at several β, or the base model itself with a request for what is wanted.

    Args:
        best_of: in place of β, keep the best of n unguided samples by the reward at their end; the values of n.
        ask: in place of all these, one or more requests. Each is put to the unguided base model with the prompt, and
            makes a cell of its own.
    """

    folder: str = ""  # a reward model, or the experts of DExperts or GeDi, as `radq generate --guide` takes them
    weights: dict[str, float] = field(default_factory=dict)  # at β = 1: {toxicity: -1}, {alpha: 1} or {omega: 1}
    beta: list[float] = field(default_factory=list)
    options: dict[str, float] = field(default_factory=dict)  # that do not change with β, such as GeDi's filter_p
    clamp: bool = True  # rewards to the range of the training labels
    best_of: list[Annotated[int, COUNT]] = field(default_factory=list)
    ask: list[str] | None = None

    def at(self, beta: float) -> GuideSpec:
        """The guide at β: with the weights times β, and the options."""
        weights = {name: weight * beta for name, weight in self.weights.items()}
        return GuideSpec(self.folder, weights | self.options)


@dataclass(frozen=True)
class JudgeUse:
    """A judge (see `radq.judges.models`), the text that it reads, and the metrics of its scores.

    A judge that reads pairs compares each text with the unguided one of the same prompt and number (see
    `radq.judges.llm`); its metric is `win_rate`.
    """

    judge: str
    metrics: list[str]
    reads: Literal["continuation", "text", "pair"] = "continuation"


def list_judged(judges: Mapping[str, JudgeUse]) -> list[str]:
    """List the metrics of judges as metric[judge]."""
    return [f"{metric}[{name}]" for name, use in judges.items() for metric in use.metrics]


@dataclass(frozen=True)
class Sweep:
    """The models, prompts, settings and metrics of a sweep."""

    base: str
    prompts: list[PromptFile]
    guides: dict[str, GuideSweep] = field(default_factory=dict)
    judges: dict[str, JudgeUse] = field(default_factory=dict)
    metrics: list[str] = field(default_factory=lambda: ["dist_2", "dist_3"])
    perplexity: str | None = None  # the language model that measures it; `base`: the base model does while it decodes
    mauve: str | None = None  # the encoder of its features
    samples: Annotated[int, COUNT] = 25
    max_new_tokens: Annotated[int, COUNT] = 20
    temperature: float = 1.0
    top_k: list[int | None] = field(default_factory=lambda: [20])
    top_p: list[float | None] = field(default_factory=lambda: [None])
    kl_budget: list[Annotated[float, Range(0)] | None] = field(default_factory=lambda: [DEFAULT_KL_BUDGET])
    ends: Ends = "base"  # what decides when a guided text ends, see `Steering`
    seeds: list[int] = field(default_factory=lambda: [0])
    batch_size: Annotated[int, COUNT] = 100  # texts decoded together
    resamples: Annotated[int, Range(1, MAX_RESAMPLES)] = 1000  # of the prompts, for the intervals
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    engine: Literal["transformers", "vllm"] = "transformers"
    vllm: dict[str, Any] = field(default_factory=dict)  # options of vllm.LLM, such as gpu_memory_utilization

    def __post_init__(self) -> None:
        check_values(self)
        _check(self)

    def check_models(self) -> None:
        """Refuse models and guides that are not there, and numbers that a guide does not have; nothing is loaded."""
        check_language_model(self.base)
        for guide in self.guides.values():
            if guide.best_of:
                check_reward_model(guide.folder, guide.weights)
            elif not guide.ask:
                guide.at(1.0).check()

    def cells(self) -> list["SweepCell"]:
        """List all cells, guide by guide, so that each guide is loaded once; the unguided base model comes first."""
        settings = list(product(self.top_k, self.top_p, self.kl_budget, self.seeds))
        cells = [SweepCell(UNGUIDED, None, k, p, None, seed) for k, p, _, seed in settings]
        for name, guide in self.guides.items():
            for k, p, kl, seed in settings:
                cells += [SweepCell(name, beta, k, p, kl, seed) for beta in guide.beta]
                cells += [SweepCell(name, None, k, p, None, seed, best_of=n) for n in guide.best_of]
                cells += [SweepCell(name, None, k, p, None, seed, ask=n) for n, _ in enumerate(guide.ask or (), 1)]
        return list(dict.fromkeys(cells))  # only a guide that steers has a KL budget: others have a cell once

    def mauve_reference(self, cell: "SweepCell") -> "SweepCell | None":
        """The unguided cell that MAUVE compares a cell with.

        It has the same candidates and seed. Unguided cells of later seeds are compared with that of the first seed:
        no guide can be expected to come closer. That one is then compared with none.
        """
        if cell.guide != UNGUIDED or len(self.seeds) == 1:
            return cell.reference
        return None if cell.seed == self.seeds[0] else replace(cell, seed=self.seeds[0])

    def read_prompts(self) -> list[Prompt]:
        """Read the prompts of all files, in order."""
        return [
            prompt
            for part in self.prompts
            for prompt in read_prompts(part.file, part.group, part.limit, part.seed, part.max_toxicity)
        ]


@dataclass(frozen=True)
class SweepCell:
    """One setting of the sweep. Its name is its key in all files of the run."""

    guide: str
    beta: float | None  # None for the unguided base and for the best of n
    top_k: int | None
    top_p: float | None
    kl_budget: float | None
    seed: int
    best_of: int | None = None  # the n of the best of n
    ask: int | None = None  # the number of the request, from 1 on

    @property
    def name(self) -> str:
        numbers = {"β": self.beta, "n": self.best_of, "ask": self.ask, "k": self.top_k, "p": self.top_p}
        numbers |= {"kl": self.kl_budget, "seed": self.seed}
        return " ".join([self.guide, *(f"{name}={exact(n)}" for name, n in numbers.items() if n is not None)])

    @property
    def reference(self) -> "SweepCell":
        """The unguided cell with the same candidates and seed."""
        return SweepCell(UNGUIDED, None, self.top_k, self.top_p, None, self.seed)


# --- files ---


def load_sweep(file: str | Path) -> Sweep:
    """Read a sweep from a YAML file. A single item stands for a list of one, and a text such as 1e-4 for its number."""
    return read_yaml(file, Sweep)


def fingerprint_prompts(prompts: list[Prompt]) -> str:
    """Hash the texts and classes of the prompts."""
    return hashlib.sha256(json.dumps([[prompt.text, prompt.group] for prompt in prompts]).encode()).hexdigest()


def find_changes(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Describe the differences between two sweeps, such as "samples: 25 → 10"."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from find_changes(old.get(name), new.get(name), f"{place}.{name}".strip("."))
    elif old != new:
        yield f"{place}: {json.dumps(old, ensure_ascii=False)} → {json.dumps(new, ensure_ascii=False)}"


# --- checks ---


def _check(sweep: Sweep) -> None:
    """Refuse combinations of values that make no sense."""
    for name in ("prompts", "top_k", "top_p", "kl_budget", "seeds"):
        if not getattr(sweep, name):
            raise OptionError(f"{name} must have at least one item, got none.", "give one or more.")
        if name != "prompts":
            _require_different(name, getattr(sweep, name))
    for name, guide in sweep.guides.items():
        _check_guide(name, guide)
        other = "asks the base model" if guide.ask else "is the best of n or unclamped"
        if sweep.engine != "transformers" and (guide.ask or guide.best_of or not guide.clamp):
            problem = f"guide {name!r} {other}, which the engine {sweep.engine!r} cannot do."
            raise OptionError(problem, "use the engine transformers.")
    for judge, use in sweep.judges.items():
        for metric in use.metrics:
            check_metric(metric)
            if metric not in ATTRIBUTE_METRICS:
                raise OptionError(f"{metric!r} under the judge {judge!r} needs no judge.", "move it to 'metrics'.")
            if (metric == "win_rate") != (use.reads == "pair"):
                raise OptionError(
                    f"the judge {judge!r} has the metric {metric!r} and reads {use.reads!r}.",
                    "give 'reads: pair' and 'metrics: win_rate' together, and no other metric with them.",
                )
    for metric in sweep.metrics:
        check_metric(metric)
        if metric in ATTRIBUTE_METRICS:
            raise OptionError(f"{metric!r} under 'metrics' needs a judge.", "move it to the metrics of a judge.")
        for needed, option in (("nll", "perplexity"), ("features", "mauve")):
            if needed in METRICS[metric].needs and getattr(sweep, option) is None:
                raise OptionError(f"{metric} has no model to measure it.", f"name one under {option!r}.")
        if "drawn_nll" in METRICS[metric].needs and sweep.perplexity != WHILE_DECODING:
            raise OptionError(
                f"{metric} is measured while decoding, and perplexity is measured by {sweep.perplexity!r}.",
                f"set 'perplexity: {WHILE_DECODING}'.",
            )
    if sweep.perplexity == WHILE_DECODING and sweep.engine != "transformers":
        raise OptionError(
            f"the engine {sweep.engine!r} cannot measure perplexity while it decodes.",
            "name the language model that measures it under 'perplexity'.",
        )


def _check_guide(name: str, guide: GuideSweep) -> None:
    """Refuse a guide whose name cannot be part of a file name, or that has no values to sweep."""
    if name == UNGUIDED or not re.fullmatch(r"[\w.+() -]+", name):
        raise OptionError(
            f"a guide must not be called {name!r}.", f"use letters, digits, spaces and _.+()-, and not {UNGUIDED!r}."
        )
    if guide.ask is not None:
        if not guide.ask or not all(request.strip() for request in guide.ask):
            hint = "write what the base model is asked for under 'ask'."
            raise OptionError(f"guide {name!r} has a blank request.", hint)
        for given in ("folder", "weights", "beta", "options", "best_of"):
            if getattr(guide, given):
                raise OptionError(f"guide {name!r} asks the base model, which takes no {given}.", f"remove {given!r}.")
        return
    for option in ("folder", "weights"):
        if not getattr(guide, option):
            raise OptionError(f"guide {name!r} has no {option!r}.", f"add {option!r} with its value.")
    if bool(guide.beta) == bool(guide.best_of):
        raise OptionError(
            f"guide {name!r} must have values of either beta or best_of, got {'both' if guide.beta else 'neither'}.",
            "give one of them.",
        )
    for option in ("beta", "best_of"):
        _require_different(f"{option} of guide {name!r}", getattr(guide, option))
    if guide.best_of and guide.options:
        raise OptionError(f"guide {name!r} keeps the best of n, which takes no options.", "remove its options.")


def _require_different(name: str, values: Sequence[Any]) -> None:
    """Refuse equal values: their cells would have one name."""
    for value in values:
        if values.count(value) > 1:
            shown = value if value is None else exact(value)
            raise OptionError(f"{name} must be different values, got {shown} twice.", "remove one of them.")
