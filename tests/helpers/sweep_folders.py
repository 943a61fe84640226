"""A run folder as `radq eval` writes it, with numbers from formulas, and a reader of html, for tests of reports."""

import json
from html.parser import HTMLParser
from itertools import combinations, product
from math import exp
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from radq.report.results import Result

HOSTILE = "<script>alert(1)</script> | a_b 100% $x$ & \\end{tabular} \x00\ud800 ``` [x](javascript:1)"
BAD_GUIDE = "<script>alert(1)</script> | a_b 100% $x$ & \\x"
GUIDES = {"rad-q": 1.0, "rad-v": 1.15, "dexperts": 0.75}  # how well they do
BETAS = (10.0, 50.0, 100.0, 300.0)
GROUPS = ("all", "neutral", "negative")
NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zs", "Zl", "Zp")), min_size=1, max_size=12
)


def make_run(
    folder: Path,
    guides: dict[str, float] = GUIDES,
    groups: tuple[str, ...] = GROUPS,
    top_ks: tuple[int | None, ...] = (20,),
    seeds: tuple[int, ...] = (0,),
    judges: tuple[str, ...] = ("",),
    config: str = "base: gpt2-large\nguides: [rad-q, rad-v]\n",
    prompts: int | None = 100,
) -> Path:
    """Guides × β × top-k × seeds, and the unguided base."""
    folder.mkdir(parents=True)
    strengths = [("none", None), *product(guides, BETAS)]
    cells = [make_cell(*strength, k, seed) for strength, k, seed in product(strengths, top_ks, seeds)]
    rows = [cell | measure_cell(cell, group, guides, judges, prompts) for cell, group in product(cells, groups)]
    write_lines(folder / "metrics.jsonl", rows)
    counts = {"seconds": 2.0, **dict.fromkeys(("tokens", "steps", "calls", "expert_tokens"), 2469)}
    write_lines(folder / "costs.jsonl", [{"cell": cell["cell"], **counts, "peak_memory": 3 * 2**30} for cell in cells])
    pairs = [
        make_difference(first, second, metric + judge, group, guides)
        for first, second in combinations(guides, 2)
        for metric, judge, group in product(("avg_max", "positive_rate"), judges, groups)
    ]
    write_lines(folder / "differences.jsonl", pairs)
    write_lines(folder / "generations.jsonl", [line for cell in cells for line in make_generations(cell, groups)])
    (folder / "config.yaml").write_text(config)
    return folder


def make_cell(guide: str, beta: float | None, top_k: int | None, seed: int) -> dict[str, Any]:
    name = f"{guide} β={beta} k={top_k} seed={seed}"
    setting = {"beta": beta, "top_k": top_k, "top_p": None, "kl_budget": None, "seed": seed}
    return {"cell": name, "guide": guide, **setting}


def measure_cell(
    cell: dict[str, Any], group: str, guides: dict[str, float], judges: tuple[str, ...], prompts: int | None
) -> dict[str, Any]:
    beta, skill = cell["beta"] or 0.0, guides.get(cell["guide"], 1.0)
    noise = 0.004 * cell["seed"] + 0.02 * GROUPS.index(group) if group in GROUPS else 0.0
    score = 0.08 + 0.3 * exp(-skill * beta / 90) + noise
    width = (cell["top_k"] or 40) / 20
    metrics: dict[str, Any] = {
        "perplexity": interval(11.0 * width**0.4 * exp((beta / 300) ** 1.4 / skill) + 10 * noise, 0.4),
        "mauve": interval(0.97 - 0.3 * (beta / 300) ** 1.3 / skill, 0.02) if group == "all" else None,
        "dist_2": interval(0.81 - beta / 5000, 0.01),
    }
    for judge in judges:
        metrics[f"avg_max{judge}"] = interval(score, 0.012) | {"skipped": 3 if cell["guide"] == "dexperts" else 0}
        metrics[f"toxic_rate{judge}"] = interval(score / 2.2, 0.01)
        metrics[f"positive_rate{judge}"] = interval(1 - score, 0.02)
    if cell["guide"] == "rad-v" and beta == 300:
        metrics["perplexity"]["infinite"] = 2
    changes = (
        {} if cell["beta"] is None else {f"avg_max{judge}": interval(score - 0.38 - noise, 0.01) for judge in judges}
    )
    counts = {} if prompts is None else {"prompts": prompts, "samples": 6}
    return {"group": group, **counts, "metrics": metrics, "changes": changes}


COST = {"tokens_per_second": 1234.5, "calls_per_token": 1.0, "expert_tokens_per_token": 1.0, "peak_memory": 3 * 2**30}


def interval(value: float, half: float) -> dict[str, Any]:
    return {"value": value, "low": value - half, "high": value + half, "skipped": 0, "infinite": 0}


def make_difference(first: str, second: str, metric: str, group: str, guides: dict[str, float]) -> dict[str, Any]:
    value = (guides[second] - guides[first]) / 10
    names = {"first": first, "second": second, "metric": metric, "group": group}
    return {**names, "value": value, "low": value - 0.02, "high": value + 0.015, "perplexity": [11.2, 24.0]}


def make_generations(cell: dict[str, Any], groups: tuple[str, ...], prompts: int = 12) -> list[dict[str, Any]]:
    classes = [group for group in groups if group != "all"] or list(groups)
    return [
        {
            "cell": cell["cell"],
            "prompt": index,
            "group": classes[index % len(classes)],
            "text": f"prompt {index} {HOSTILE}" if index == 1 else f"The weather on day {index} was",
            "continuations": [f" text {n} of {cell['cell']}" for n in range(4)] + [HOSTILE, " "],
        }
        for index in range(prompts)
    ]


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_result(**fields: Any) -> Result:
    known = {"run": "r", "cell": "c", "guide": "rad-q", "unguided": False, "beta": 10.0, "top_k": 20, "top_p": None}
    more = {"kl_budget": None, "seed": 0, "group": "all", "metrics": {}, "cost": {}}
    return Result(**(known | more | fields))


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def svg_texts(svg: str) -> str:
    return "\n".join(Page(svg).texts)


class Page(HTMLParser):
    """Tags, attributes, texts and table cells of a page."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.cells: list[list[str]] = []
        self.in_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.in_cell:
            self.cells[-1][-1] += data
