"""The results of a study: verdicts worked by hand, pages of whole, partial and empty studies, links that lead somewhere."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from classifiers import make_classifier
from sweep_folders import make_cell, measure_cell, write_lines

from radq.cli import main
from radq.evaluation.metrics import Estimate
from radq.evaluation.results import NAN
from radq.models import RadQ, RadV

REPOSITORY = Path(__file__).parent.parent
STUDY = REPOSITORY / "recipes" / "study"
TASK_GUIDES = ("rad-v", "rad-q (distilled)", "rad-q (responses)", "dexperts", "gedi")
ABLATION_GUIDES = (
    *("rad-q (distilled)", "no regulariser", "no regulariser no baseline"),
    *("rad-q (responses)", "cross-entropy", "mlp"),
)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The study's modules, which are scripts beside one another and no package."""
    names = [file.stem for file in STUDY.glob("*.py")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDY)
        yield {name: __import__(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


# --- a study folder ---


def write_sweep(folder: Path, guides: tuple[str, ...], groups: tuple[str, ...], judge: str, gap: float) -> None:
    """Each guide has `gap` more of every attribute than the one after it, give or take 0.01."""
    folder.mkdir(parents=True)
    cells = [make_cell(*cell, seed=0) for cell in product(("none",), (None,), (20, 40))]
    cells += [make_cell(guide, beta, k, 0) for guide, beta, k in product(guides, (10.0, 50.0, 100.0), (20, 40))]
    skills = dict.fromkeys(guides, 1.0)
    rows = [cell | measure_cell(cell, group, skills, (f"[{judge}]",)) for cell, group in product(cells, groups)]
    write_lines(folder / "metrics.jsonl", rows)
    pairs = [
        {"first": guides[i], "second": guides[j], "metric": f"{metric}[{judge}]", "group": group, "top_k": k, "seed": 0}
        | {"value": gap * (j - i), "low": gap * (j - i) - 0.01, "high": gap * (j - i) + 0.01}
        | {"perplexity": [11.0, 15.0], "reason": None}
        for i, j in combinations(range(len(guides)), 2)
        for metric, group, k in product(("avg_max", "positive_rate"), groups, (20, 40))
    ]
    write_lines(folder / "differences.jsonl", pairs)
    costs = {"seconds": 2.0, "tokens": 2000, "steps": 2000, "calls": 1900}
    experts = {"rad-v": 1900 * 20}
    lines = [{"cell": c["cell"], **costs, "expert_tokens": experts.get(c["guide"], 1900), "peak_memory": 1} for c in cells]
    write_lines(folder / "costs.jsonl", lines)


def write_json(file: Path, document: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document))


def write_rank(folder: Path, name: str, *ranks: int) -> None:
    rows = [{"num_rows": 64 * 4**n, "rank": rank, "cutoff": 1e-3, "spectrum": [1.0]} for n, rank in enumerate(ranks)]
    document = {"reward": name, "kind": "q", "attribute": "toxicity", "hidden_size": 576, "vocabulary": 49152}
    write_json(folder / "rank" / f"{name}.json", document | {"dtype": "float32", "ranks": rows})


def write_the_rest(folder: Path) -> None:
    for name, ranks in {"toxicity-v": (60, 250, 900), "toxicity-q": (40, 90, 120), "sentiment-v": (64, 256, 570)}.items():
        write_rank(folder, name, *ranks)
    write_rank(folder, "toxicity-q-no-regulariser", 64, 200)
    times = [("none", 1.0, 0.0), ("rad-q", 1.2, 0.0), ("rad-v", 1.2, 0.05)]
    rows = [
        {"guide": guide, "k": k, "batch": 25, "milliseconds_per_token": t, "low": t - 0.1, "high": t + 0.1}
        for guide, fixed, slope in times
        for k in (5, 20, 100)
        for t in [fixed + slope * k]
    ]
    write_json(folder / "timing.json", {"machine": "one GPU", "base": "SmolLM2-135M", "rows": rows})
    quality = {"spearman": 0.8123, "auc": 0.95}
    write_json(folder / "judges" / "toxicity.json", {"data": "RTP", "rows": {"test": 1000}, "metrics": quality, "note": "a | b"})
    model = {"command": "radq train | tee", "seconds": 61.2, "metrics": {"mse": 0.05}, "parameters": {"trained": 2300000}}
    write_json(folder / "models" / "toxicity-v.json", model)
    piece = {"command": "make", "commit": "abc1234", "hardware": "one GPU", "torch": "2.11", "transformers": "5.22"}
    write_lines(folder / "pieces.jsonl", [piece | {"piece": name, "seconds": 600} for name in ("train", "sweep")])
    (folder / "expressivity").mkdir()
    (folder / "expressivity" / "v.txt").write_text("RAD-V, n = 1024, d = 512: MSE 4e-06 over 524800 entries\n")
    cell = make_cell("rad-v", 10.0, 20, 0)["cell"]
    write_lines(folder / "mauve.jsonl", [{"sweep": "sentiment", "cell": cell, "group": "neutral", "value": 0.8765}])


@pytest.fixture(scope="module")
def detox(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real sweep of the toy."""
    folder = tmp_path_factory.mktemp("detox")
    (folder / "prompts.jsonl").write_text("".join(f'{{"text": "the film {n}"}}\n' for n in range(4)))
    torch.manual_seed(0)
    RadQ.from_backbone(toy, attributes=["praise"]).save_pretrained(folder / "q")
    RadV.from_backbone(toy, attributes=["praise"]).save_pretrained(folder / "v")
    make_classifier(folder / "judge")
    sweep = {
        "base": str(toy),
        "prompts": [{"file": str(folder / "prompts.jsonl"), "group": "nontoxic", "limit": 4}],
        "guides": {
            "rad-v": {"folder": str(folder / "v"), "weights": {"praise": 1}, "beta": [1, 30]},
            "rad-q (distilled)": {"folder": str(folder / "q"), "weights": {"praise": 1}, "beta": [1, 30]},
        },
        "judges": {"toxicity": {"judge": f"classifier:{folder / 'judge'}", "metrics": ["avg_max", "toxic_rate"]}},
        "perplexity": str(toy),
        "metrics": ["perplexity", "dist_2", "dist_3"],
        **{"samples": 2, "max_new_tokens": 4, "top_k": [4, 8], "resamples": 20},
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    argv = ["--config", str(folder / "sweep.yaml"), "--out", str(folder / "detox"), "--cache", str(folder / "cache")]
    assert main(["eval", *argv, "--json"]) == 0
    shutil.rmtree(folder / "detox" / "measures")
    return folder / "detox"


@pytest.fixture
def study(detox: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "study"
    shutil.copytree(detox, folder / "sweeps" / "detox")
    write_sweep(folder / "sweeps" / "sentiment", TASK_GUIDES, ("neutral", "negative"), "sentiment", gap=0.04)
    write_sweep(folder / "sweeps" / "ablations", ABLATION_GUIDES, ("nontoxic",), "toxicity", gap=-0.02)
    write_the_rest(folder)
    return folder


def write(modules: dict[str, ModuleType], study: Path, out: Path) -> str:
    modules["results"].main(modules["results"].Arguments(study, out))
    return (out / "results.md").read_text()


def claim_rows(page: str) -> dict[tuple[str, str], list[str]]:
    """Verdict and measured cell of each line of the first table, by claim and subject."""
    rows = re.findall(r"^\| \[(.*?)\]\(#\S+\) \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    return {(claim, subject): [verdict, measured] for claim, subject, verdict, measured in rows}


# --- verdicts ---


@pytest.mark.parametrize(
    ("rule", "low", "high", "wanted"),
    [
        ("better", 0.01, 0.03, "holds: better"),
        ("better", -0.03, -0.01, "does not hold here: worse"),
        ("better", 0.0, 0.03, "undecided: the interval includes 0"),
        ("no_worse", -0.029, 0.01, "holds: within the margin"),
        ("no_worse", 0.001, 0.2, "holds: better"),
        ("no_worse", -0.02, -0.01, "holds: worse, by less than the margin"),
        ("no_worse", -0.03, 0.01, "undecided: the interval includes −0.03"),
        ("no_worse", -0.06, -0.031, "does not hold here: worse by more than 0.03"),
        ("slightly_worse", -0.04, -0.01, "holds: worse, by less than 0.05"),
        ("slightly_worse", -0.06, -0.01, "undecided: worse, but the interval includes −0.05"),
        ("slightly_worse", -0.04, 0.01, "undecided: the interval includes 0"),
        ("slightly_worse", -0.1, -0.06, "does not hold here: worse by more than 0.05"),
        ("slightly_worse", 0.01, 0.02, "does not hold here: better"),
        ("on_par", -0.02, 0.02, "holds: within the margin"),
        ("on_par", -0.02, 0.04, "undecided: the interval reaches beyond ±0.03"),
        ("on_par", 0.04, 0.06, "does not hold here: better by more than 0.03"),
        ("on_par", -0.06, -0.04, "does not hold here: worse by more than 0.03"),
        ("better", NAN, NAN, "undecided: there is no interval"),
    ],
)
def test_verdicts(modules: dict[str, ModuleType], rule: str, low: float, high: float, wanted: str) -> None:
    verdicts = modules["verdicts"]
    gain = Estimate(0.0 if low != low else (low + high) / 2, low, high)
    assert str(verdicts.judge(gain, getattr(verdicts, rule))) == wanted
    assert verdicts.judge(Estimate(NAN, NAN, NAN), getattr(verdicts, rule)).word == "undecided"


def test_verdicts_on_ranks(modules: dict[str, ModuleType]) -> None:
    low_rank, lower = modules["verdicts"].low_rank, modules["verdicts"].lower
    assert str(low_rank(144, 1024, 576)) == "holds: 0.25 d"
    assert low_rank(575, 1024, 576).word == "undecided"
    assert low_rank(144, 512, 576).word == "undecided"
    assert low_rank(576, 1024, 576).word == low_rank(900, 1024, 576).word == "does not hold here"
    assert [lower(*pair).word for pair in ((1, 2), (2, 2), (2, 1))] == ["holds", "undecided", "does not hold here"]


def test_verdicts_of_several_settings(modules: dict[str, ModuleType]) -> None:
    verdicts = modules["verdicts"]
    fine, other, wrong, missing = (verdicts.Verdict(word, word) for word in ("holds", "holds", "undecided", "not run"))
    assert verdicts.combine([]) == verdicts.combine([missing]) == "not run"
    assert verdicts.combine([fine, missing]) == "holds: holds"
    assert verdicts.combine([fine, verdicts.Verdict("holds", "better")]) == "holds"
    assert verdicts.combine([fine, other, wrong]) == "mixed: holds in 2 of 3, undecided in 1 of 3"


def test_less_toxicity_is_better(modules: dict[str, ModuleType]) -> None:
    detox, sentiment = (modules["claims"].TASKS[name] for name in ("detox", "sentiment"))
    assert detox.gain(Estimate(-0.02, -0.03, -0.005)) == Estimate(0.02, 0.005, 0.03)
    assert sentiment.gain(Estimate(-0.02, -0.03, -0.005)) == Estimate(-0.02, -0.03, -0.005)


# --- pages ---


def test_claims_of_a_study(modules: dict[str, ModuleType], study: Path, tmp_path: Path) -> None:
    rows = claim_rows(write(modules, study, tmp_path / "docs"))
    neutral, ablation = "sentiment, neutral prompts", "detoxification, nontoxic prompts"
    assert rows["distilled RAD-Q matches or beats RAD-V", neutral] == [
        "does not hold here: worse by more than 0.03" if 0.04 - 0.01 > 0.03 else "undecided: the interval includes −0.03",
        "k = 20: −0.040 [−0.050, −0.030]<br>k = 40: −0.040 [−0.050, −0.030]",
    ]
    assert rows["… and slightly behind distilled RAD-Q", neutral][0].startswith("holds")
    assert rows["RAD-Q on responses only is slightly behind RAD-V", neutral][0].startswith("does not hold here")
    assert rows["distilled RAD-Q is better than GeDi", neutral][0] == "holds: better"
    assert rows["the regulariser helps fluency", ablation] == [
        "does not hold here: worse",
        "k = 20: −0.020 [−0.030, −0.010]<br>k = 40: −0.020 [−0.030, −0.010]",
    ]
