"""The paper's published numbers (published.csv: every figure of its tables), as curves to draw beside a run's own.

find_published("avg_max", "perplexity", group="all", base="GPT-2-Large", judge="Perspective")[0].points
"""

import csv
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import isfinite

METRIC_NAMES = {"avg_max": "average_max_toxicity", "toxic_rate": "toxic_rate", "positive_rate": "positive_rate"}
PERCENT = ("positive_rate",)  # the paper prints them as percentages
BASES = ("GPT-2-Large", "LLaMA-2-7b", "LLaMA-2-13b")
TOXICITY_JUDGES = ("Perspective", "ToxicityModel")


@dataclass(frozen=True)
class PublishedCurve:
    method: str
    top_k: int | None  # the paper does not say it of LLaMA
    base: str
    judge: str
    points: tuple[tuple[float, float, float], ...]  # β, fluency, attribute

    @property
    def label(self) -> str:
        setting = "" if self.top_k is None else f", k={self.top_k}"
        return f"{self.method}{setting} (paper: {self.base}, {self.judge})"


def find_published(
    metric: str,
    fluency: str,
    group: str,
    base: str = "GPT-2-Large",
    judge: str = "Perspective",
    top_ks: Collection[int] = (),
) -> list[PublishedCurve]:
    """Curves of a metric against perplexity or MAUVE; those of the given top-k where the paper has them, else all.

    `judge` chooses among those of toxicity; sentiment has one. The paper's detoxification is about nontoxic prompts,
    its sentiment about classes of prompts: one is drawn where the class has its name.
    """
    rows = [row for row in _rows() if row["metric"] == METRIC_NAMES.get(metric) and row["base"] == base]
    if metric == "positive_rate":
        rows = [row for row in rows if row["prompts"] in group.lower()]
    else:
        rows = [row for row in rows if row["judge"] == judge]
    if any(_top_k(row) in top_ks for row in rows):
        rows = [row for row in rows if _top_k(row) in top_ks]
    fluencies = {_setting(row): float(row["value"]) for row in _rows() if row["metric"] == fluency}
    scale = 0.01 if metric in PERCENT else 1.0
    found: dict[tuple[str, int | None, str], list[tuple[float, float, float]]] = {}
    for row in rows:
        point = (float(row["beta"]), fluencies.get(_setting(row), float("nan")), scale * float(row["value"]))
        if all(map(isfinite, point)):
            found.setdefault((row["method"], _top_k(row), row["judge"]), []).append(point)
    return [PublishedCurve(m, k, base, j, tuple(sorted(points))) for (m, k, j), points in found.items()]


def find_named(names: Collection[str], text: str) -> str:
    """The one of the paper's names that a text mentions, else the first."""
    plain = text.lower().replace("-hf", "")
    return next((name for name in names if name.lower() in plain), next(iter(names)))


def published_calls() -> str:
    """Calls of the expert per generated token, as the paper counts them."""
    rows = [row for row in _rows() if row["metric"] == "calls"]
    return ", ".join(f"{row['method']} {'k' if row['value'] == 'nan' else row['value']}" for row in rows)


def _top_k(row: dict[str, str]) -> int | None:
    return int(row["top_k"]) if row["top_k"] else None


def _setting(row: dict[str, str]) -> tuple[str, ...]:
    """What a run of the paper is known by: judges, tables and classes of prompts share its perplexity and MAUVE."""
    return tuple(row[name] for name in ("task", "base", "method", "top_k", "beta"))


@cache
def _rows() -> tuple[dict[str, str], ...]:
    text = (files("radq.evaluation") / "published.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))
