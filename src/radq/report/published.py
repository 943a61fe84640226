"""The paper's published numbers as curves, to be drawn beside those of a run.

    find_published("avg_max", "perplexity", group="all", base="GPT-2-Large", judge="Perspective")[0].points

published.csv holds every number of the paper's tables, under radq's names of metrics.
"""

import csv
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import isfinite

PERCENT = ("positive_rate",)  # printed as percentages in the paper
BASES = ("GPT-2-Large", "LLaMA-2-7b", "LLaMA-2-13b")
TOXICITY_JUDGES = ("Perspective", "ToxicityModel")


@dataclass(frozen=True)
class PublishedCurve:
    """The numbers of one method in the paper, by β."""

    method: str
    top_k: int | None  # None for LLaMA, where the paper does not name it
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
    """Find the paper's curves of a metric against perplexity or MAUVE.

    Where the paper has curves for one of `top_ks`, only these are returned. `judge` chooses among the two judges of
    toxicity; sentiment has one judge. The paper's toxicity is that of nontoxic prompts, and is returned for any class;
    its positive rates are returned for classes with the paper's names, such as "neutral".
    """
    rows = [row for row in _rows() if row["metric"] == metric and row["base"] == base]
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
    """Find the first of the paper's names that a text mentions, else return the first name."""
    plain = text.lower().replace("-hf", "")
    return next((name for name in names if name.lower() in plain), next(iter(names)))


def published_calls() -> str:
    """List the calls of experts per generated token, as the paper counts them."""
    rows = [row for row in _rows() if row["metric"] == "calls"]
    return ", ".join(f"{row['method']} {'k' if row['value'] == 'nan' else row['value']}" for row in rows)


def _top_k(row: dict[str, str]) -> int | None:
    return int(row["top_k"]) if row["top_k"] else None


def _setting(row: dict[str, str]) -> tuple[str, ...]:
    """The columns that identify a run of the paper. Judges and classes of prompts share its perplexity and MAUVE."""
    return tuple(row[name] for name in ("task", "base", "method", "top_k", "beta"))


@cache
def _rows() -> tuple[dict[str, str], ...]:
    text = (files("radq.report") / "published.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))
