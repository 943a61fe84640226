"""The study: verdicts worked by hand; pages of whole, partial and empty studies; jobs that run once."""

import json
import re
import shutil
import subprocess
import sys
from itertools import combinations, product
from math import log
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from classifiers import make_classifier
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import run_script
from sweep_folders import make_cell, make_result, measure_cell, write_lines

from radq.cli import main
from radq.errors import DataError, OptionError
from radq.evaluation.estimates import Estimate
from radq.evaluation.sweep.config import load_sweep
from radq.models.kinds import RadQ, RadV
from radq.report.results import NAN
from radq.settings import read_yaml
from radq.training.config import ExpertTrainingConfig, RewardTrainingConfig

REPOSITORY = Path(__file__).parents[2]
STUDY = REPOSITORY / "study"
TASK_GUIDES = ("rad-v", "rad-q (distilled)", "rad-q (labels)", "dexperts", "gedi")
METRICS = ("dist_2", "positive_rate[sentiment]")
ABLATION_GUIDES = (
    *("rad-q (distilled)", "no regulariser", "no regulariser no baseline"),
    *("rad-q (labels)", "cross-entropy", "mlp"),
)


# --- a study folder ---


def write_sweep(folder: Path, guides: tuple[str, ...], groups: tuple[str, ...], judge: str, gap: float) -> None:
    """Each guide has `gap` more of every attribute than the one after it, give or take 0.01."""
    folder.mkdir(parents=True)
    cells = [make_cell(*cell, seed=0) for cell in product(("none",), (None,), (20, 40))]
    cells += [make_cell(guide, beta, k, 0) for guide, beta, k in product(guides, (10.0, 50.0, 100.0), (20, 40))]
    skills = dict.fromkeys(guides, 1.0)
    rows = [cell | measure_cell(cell, group, skills, (f"[{judge}]",), None) for cell, group in product(cells, groups)]
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
    lines = [
        {"cell": c["cell"], **costs, "expert_tokens": experts.get(c["guide"], 1900), "peak_memory": 1} for c in cells
    ]
    write_lines(folder / "costs.jsonl", lines)


def write_json(file: Path, document: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document))


def write_rank(folder: Path, name: str, *ranks: int) -> None:
    """A tenth of the rank lies above 0.01 of the largest singular value, and the rank also above 0.001 of it."""
    rows = [
        {"num_rows": 64 * 4**n, "rank": rank, "cutoff": 0.01}
        | {"spectrum": [2.0] * (rank // 10) + [0.01] * (rank - rank // 10) + [1e-5] * (64 * 4**n - rank)}
        for n, rank in enumerate(ranks)
    ]
    document = {"reward": name, "kind": "q", "attribute": "toxicity", "hidden_size": 576, "vocabulary": 49152}
    write_json(folder / "rank" / f"{name}.json", document | {"dtype": "float32", "ranks": rows})


def write_the_rest(folder: Path) -> None:
    for name, ranks in {
        "toxicity-v": (60, 250, 900),
        "toxicity-q": (40, 90, 120),
        "sentiment-v": (64, 256, 570),
    }.items():
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
    write_json(folder / "judges" / "toxicity.json", {"data": "RTP", "rows": {"test": 1000}, "metrics": quality})
    (folder / "expressivity").mkdir()
    (folder / "expressivity" / "v.txt").write_text("RAD-V, n = 1024, d = 512: MSE 4e-06 over 524800 entries\n")
    sample = {
        "attribute": "toxicity",
        "prompt": "It was",
        "beta": -100.0,
        "unguided": " a\n| bad *day*",
        "guided": " fine",
    }
    write_lines(folder / "samples.jsonl", [sample])


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
        "samples": 2,
        "max_new_tokens": 4,
        "top_k": [4, 8],
        "resamples": 20,
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    argv = ["--config", str(folder / "sweep.yaml"), "--out", str(folder / "detox"), "--cache", str(folder / "cache")]
    assert main(["eval", *argv, "--json"]) == 0
    shutil.rmtree(folder / "detox" / "measures")
    return folder / "detox"


def make_study(folder: Path, detox: Path) -> Path:
    shutil.copytree(detox, folder / "sweeps" / "detox")
    write_sweep(folder / "sweeps" / "sentiment", TASK_GUIDES, ("neutral", "negative"), "sentiment", gap=0.045)
    write_sweep(folder / "sweeps" / "detox-ablations", ABLATION_GUIDES, ("nontoxic",), "toxicity", gap=-0.02)
    write_the_rest(folder)
    return folder


@pytest.fixture
def study(detox: Path, tmp_path: Path) -> Path:
    return make_study(tmp_path / "study", detox)


@pytest.fixture(scope="module")
def docs(modules: dict[str, ModuleType], detox: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a whole study gives; the study lies beside it."""
    folder = tmp_path_factory.mktemp("whole")
    write(modules, make_study(folder / "study", detox), folder / "docs")
    return folder / "docs"


@pytest.fixture
def page(docs: Path) -> str:
    return (docs / "results.md").read_text()


def write(modules: dict[str, ModuleType], study: Path, out: Path) -> str:
    modules["page"].main(study, out)
    return (out / "results.md").read_text()


def claim_rows(page: str) -> dict[tuple[str, str], list[str]]:
    """Verdict and measured cell of each line of the table of claims, by claim and subject."""
    table = page.partition("| claim | where |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {(claim, subject): [verdict, measured] for claim, subject, verdict, measured in rows}


# --- verdicts ---


@pytest.mark.parametrize(
    ("rule", "low", "high", "wanted"),
    [
        ("BETTER", 0.01, 0.03, "holds: better"),
        ("BETTER", -0.03, -0.01, "does not hold here: worse"),
        ("BETTER", 0.0, 0.03, "undecided: the interval includes 0"),
        ("NO_WORSE", -0.029, 0.01, "holds: within the margin"),
        ("NO_WORSE", 0.001, 0.2, "holds: better"),
        ("NO_WORSE", -0.02, -0.01, "holds: worse, by less than 0.03"),
        ("NO_WORSE", -0.04, -0.01, "undecided: worse, perhaps by more than 0.03"),
        ("NO_WORSE", -0.03, 0.01, "undecided: perhaps worse by more than 0.03"),
        ("NO_WORSE", -0.06, -0.031, "does not hold here: worse by more than 0.03"),
        ("SLIGHTLY_WORSE", -0.04, -0.01, "holds: worse, by less than 0.05"),
        ("SLIGHTLY_WORSE", -0.06, -0.01, "undecided: worse, perhaps by more than 0.05"),
        ("SLIGHTLY_WORSE", -0.04, 0.01, "undecided: the interval includes 0"),
        ("SLIGHTLY_WORSE", -0.1, -0.06, "does not hold here: worse by more than 0.05"),
        ("SLIGHTLY_WORSE", 0.01, 0.02, "does not hold here: better"),
        ("ON_PAR", -0.02, 0.02, "holds: within the margin"),
        ("ON_PAR", -0.02, 0.04, "undecided: the interval exceeds ±0.03"),
        ("ON_PAR", -0.028, -0.018, "holds: worse, by less than 0.03"),
        ("ON_PAR", 0.018, 0.028, "holds: better, by less than 0.03"),
        ("ON_PAR", -0.038, -0.028, "undecided: worse, perhaps by more than 0.03"),
        ("ON_PAR", 0.04, 0.06, "does not hold here: better by more than 0.03"),
        ("ON_PAR", -0.06, -0.04, "does not hold here: worse by more than 0.03"),
        ("BETTER", NAN, NAN, "undecided: there is no interval"),
    ],
)
def test_verdicts(modules: dict[str, ModuleType], rule: str, low: float, high: float, wanted: str) -> None:
    claims = modules["claims"]
    gain = Estimate(0.0 if low != low else (low + high) / 2, low, high)
    verdict = claims.judge(gain, getattr(claims, rule).decide)
    assert f"{verdict.word}: {verdict.reason}" == wanted
    assert verdict.against == wanted.startswith("holds: worse, by less than 0.03")
    assert claims.judge(Estimate(NAN, NAN, NAN), getattr(claims, rule).decide).word == "undecided"


@pytest.mark.parametrize("rule", ["BETTER", "NO_WORSE", "SLIGHTLY_WORSE", "ON_PAR"])
@given(ends=st.tuples(st.floats(-0.1, 0.1), st.floats(-0.1, 0.1)).map(sorted))
@settings(deadline=None)
def test_no_verdict_hides_the_side_of_zero(modules: dict[str, ModuleType], rule: str, ends: list[float]) -> None:
    """A verdict says worse or better where the whole interval is on that side, whatever the rule decides."""
    low, high = ends
    decide = getattr(modules["claims"], rule).decide
    reason = modules["claims"].judge(Estimate((low + high) / 2, low, high), decide).reason
    if high < 0:
        assert reason.startswith("worse")
    elif low > 0:
        assert reason.startswith("better")
    else:
        assert not reason.startswith(("worse", "better"))


def test_verdicts_on_ranks(modules: dict[str, ModuleType]) -> None:
    low_rank, lower = modules["claims"].low_rank, modules["claims"].lower
    verdict = low_rank([58, 144, 288], 1024, 576)
    assert (verdict.word, verdict.reason) == ("holds", "0.10 to 0.50 d by the cutoff")
    assert low_rank([51, 575], 1024, 576).word == "undecided"
    assert low_rank([51, 666], 1024, 576).word == "undecided"  # the cutoff decides
    assert low_rank([51, 144], 512, 576).word == "undecided"
    assert low_rank([576, 900], 1024, 576).word == "does not hold here"
    pairs = {((1, 3), (2, 4)): "holds", ((1, 4), (2, 4)): "undecided", ((3, 5), (2, 4)): "does not hold here"}
    assert {pair: lower(*pair).word for pair in pairs} == pairs


def test_ranks_are_counted_at_several_cutoffs(modules: dict[str, ModuleType]) -> None:
    spectrum = [10.0, 1.0, 0.2, 0.05, 0.02, 0.001]
    document = {"ranks": [{"num_rows": 6, "rank": 4, "cutoff": 0.04, "spectrum": spectrum}]}
    found = {"0.01": 3, "0.004 (the paper's)": 4, "0.001": 5}
    assert modules["claims"].counts_by_rows(document) == {6: found}
    assert list(modules["claims"].counts_by_rows(document)[6]) == list(found)


def test_verdicts_of_several_settings(modules: dict[str, ModuleType]) -> None:
    claims = modules["claims"]
    fine, worse = claims.Verdict("holds", "fine"), claims.Verdict("holds", "worse", against=True)
    unsure, missing = claims.Verdict("undecided", "unsure"), claims.Verdict("not run")

    def combine(*verdicts: Any, caveats: str = "") -> str:
        findings = [claims.Finding(f"k = {20 * n}", "", verdict) for n, verdict in enumerate(verdicts, 1)]
        return claims.Claim("text", "subject", findings, caveats).verdict

    assert combine() == combine(missing) == combine(missing, caveats="small") == "not run"
    assert combine(fine, fine) == "holds: fine"
    assert combine(fine, missing) == "holds: fine (1 of 2 not run)"
    assert combine(fine, worse, fine) == "holds: fine (k = 20, 60); worse (k = 40)"
    assert combine(fine, fine, unsure) == "mixed: holds, fine (k = 20, 40); undecided, unsure (k = 60)"
    assert combine(fine, caveats="small") == "holds, with caveats (small): fine"


def test_less_toxicity_is_better(modules: dict[str, ModuleType]) -> None:
    detox, sentiment = (modules["claims"].TASKS[name] for name in ("detox", "sentiment"))
    assert detox.gain(Estimate(-0.02, -0.03, -0.005)) == Estimate(0.02, 0.005, 0.03)
    assert sentiment.gain(Estimate(-0.02, -0.03, -0.005)) == Estimate(-0.02, -0.03, -0.005)


# --- pages ---


def test_claims_of_a_study(page: str) -> None:
    rows = claim_rows(page)
    neutral, ablation = "sentiment, neutral", "detoxification, nontoxic"
    assert rows["distilled RAD-Q matches or beats RAD-V in sentiment", neutral] == [
        "does not hold here: worse by more than 0.03",
        "k = 20: −0.045 [−0.055, −0.035]; k = 40: −0.045 [−0.055, −0.035]",
    ]
    assert rows["RAD-Q trained on labels is slightly behind RAD-V", neutral][0].startswith("does not hold here")
    assert rows["RAD-Q trained on labels is slightly behind distilled RAD-Q", neutral][0].startswith("undecided: worse")
    assert rows["distilled RAD-Q is better than GeDi", neutral][0] == "holds: better"
    assert rows["the regulariser helps fluency", ablation] == [  # less toxic, as far as the interval reaches
        "holds: better (2 of 4 not run)",
        "k = 4: not run; k = 40: −0.020 [−0.030, −0.010]",
    ]
    assert rows["regulariser and baseline together help fluency", ablation][0].startswith("holds: better")
    verdict, _ = rows["cross-entropy is slightly behind squared loss", ablation]
    assert verdict == "holds: worse, by less than 0.05 (2 of 4 not run)"
    cutoffs = "above 0.01 / 0.005 (the paper's) / 0.001 σ_1"
    assert rows["learned reward matrices have low numerical rank", f"toxicity, {cutoffs}"] == [
        "mixed: undecided, 0.16 to 1.56 d by the cutoff (RAD-V); holds, 0.02 to 0.21 d by the cutoff (RAD-Q)",
        "RAD-V: 90 / 900 / 900, N = 1024, d = 576; RAD-Q: 12 / 120 / 120, N = 1024, d = 576",
    ]
    found = rows["learned reward matrices have low numerical rank", f"sentiment, {cutoffs}"]
    assert found[0] == "undecided: 0.10 to 0.99 d by the cutoff (1 of 2 not run)"
    assert rows["the regulariser lowers the rank", "toxicity, the same cutoffs"] == [
        "holds: lower at every cutoff",
        "N = 256: 9 / 90 / 90, without it 20 / 200 / 200",
    ]
    assert rows["RAD-V fits full-rank data, RAD-Q cannot", "name pairs"] == [
        "holds, with caveats (third setting tried, first check below the threshold, nothing tuned for RAD-Q): "
        "below 5e-06 (1 of 2 not run)",
        "RAD-V: MSE 4e-06; RAD-Q: not run",
    ]
    verdict, measured = rows["RAD-Q takes less time per token than RAD-V", "RAD-V's time over RAD-Q's, batch of 25"]
    assert verdict == "holds: faster"
    assert measured.endswith("k = 100: × 5.167 [4.692, 5.727]")  # 6.2 / 1.2, 6.1 / 1.3, 6.3 / 1.1


def test_a_real_sweep_has_its_verdicts(page: str, tmp_path: Path) -> None:
    rows = claim_rows(page)
    found = rows["RAD-Q reads one token in one call per generated token", "whatever k"]
    read = re.match(r"k = 4: (0\.\d+) tokens in 0\.750 calls; RAD-V 4\.000 tokens", found[1])
    assert read is not None
    assert 0.7 < float(read[1]) <= 0.75  # four tokens a text, of which the last is not read; some texts end before
    found = rows["distilled RAD-Q follows RAD-V in detoxification", "detoxification, nontoxic"]
    assert found[0] != "not run"
    assert rows["distilled RAD-Q is better than GeDi", "detoxification, nontoxic"][0] == "not run"
    assert str(tmp_path.parent) not in page


def test_the_rate_at_equal_variety_is_read_off_straight_lines(modules: dict[str, ModuleType]) -> None:
    """Over the logarithm of Dist-2, as a multiple of the unguided base's."""
    points = [("none", None, 0.8, 0.5), ("rad-q", 1.0, 0.72, 0.6), ("rad-q", 2.0, 0.64, 0.9), ("weak", 1.0, 0.78, 0.7)]
    results = [
        make_result(guide=guide, unguided=beta is None, beta=beta, group="neutral", top_k=20, metrics=metrics)
        for guide, beta, *values in points
        for metrics in [{n: Estimate(v, v, v) for n, v in zip(METRICS, values, strict=True)}]
    ]
    sweeps = {"sentiment": modules["claims"].MeasuredSweep(results, [])}
    study = modules["claims"].Study(sweeps, {}, {}, {}, {}, [])
    crossing = 0.6 + 0.3 * log(0.85 / 0.9) / log(0.8 / 0.9)
    assert modules["page"]._rate_at_equal_variety(study, "rad-q") == f"{crossing:.3f}"
    assert modules["page"]._rate_at_equal_variety(study, "weak") == "–"  # its texts never become so alike


def test_sentences_say_who_is_better(page: str) -> None:
    text = " ".join(page.split())
    assert (
        "RAD-Q trained on labels is worse than RAD-V in sentiment on neutral prompts (−0.090 [−0.100, −0.080]), in "
        "sentiment on negative prompts" in text
    )
    assert "Distilled RAD-Q is better than GeDi in sentiment on neutral prompts (+0.135 [+0.125, +0.145])" in text
    assert (
        "The rewards of toxicity after 1,024 prefixes have 90 / 900 / 900 singular values above 0.01 / 0.005 (the "
        "paper's) / 0.001 times the largest with RAD-V (900 is more than d = 576), 12 / 120 / 120 with RAD-Q" in text
    )


def test_sentences_name_other_candidates_where_these_decide_otherwise(modules: dict[str, ModuleType]) -> None:
    gains = {20: Estimate(-0.001, -0.005, 0.004), 40: Estimate(-0.006, -0.011, -0.002)}
    assert modules["page"]._gains(gains) == "−0.001 [−0.005, +0.004]; at k = 40 worse: −0.006 [−0.011, −0.002]"
    assert modules["page"]._gains(gains | {40: gains[20]}) == "−0.001 [−0.005, +0.004]"


def test_a_pair_in_the_other_order_has_the_other_sign(modules: dict[str, ModuleType], study: Path) -> None:
    sweep = modules["claims"].read_study(study).sweeps["sentiment"]
    metric = "positive_rate[sentiment]"
    straight, turned = sweep.compare("rad-v", "gedi", metric), sweep.compare("gedi", "rad-v", metric)
    assert straight.keys() == turned.keys() == set(product(("neutral", "negative"), (20, 40)))
    estimate = straight["neutral", 20]
    assert estimate.value == 0.18
    assert turned["neutral", 20] == Estimate(-estimate.value, -estimate.high, -estimate.low)


def test_links_and_images_are_there(docs: Path, page: str) -> None:
    links = re.findall(r"\]\((?!https)([^)\s]+)\)", page)
    images = {link for link in links if link.endswith(".svg")}
    assert images == {f"results/{file.name}" for file in (docs / "results").iterdir()}
    assert len(images) == 2
    for link in set(links) - images:
        assert (REPOSITORY / "docs" / link).exists(), link
    for name in images:
        assert (docs / name).stat().st_size < 100_000


def test_the_published_page_says_what_misleads() -> None:
    page = (REPOSITORY / "docs" / "results.md").read_text()
    rows, text = claim_rows(page), " ".join(page.split())
    verdict, _ = rows["distilled RAD-Q follows RAD-V in detoxification", "detoxification, nontoxic"]
    assert verdict == "holds: within the margin (k = 20); worse, by less than 0.03 (k = 40)"
    verdict, _ = rows["the MLP head is on par with the linear one", "detoxification, nontoxic"]
    assert verdict.startswith("mixed: holds, worse, by less than 0.03 (k = 20)")
    assert "In 2 of them a claim holds in some setting by the margin alone" in text
    assert "16 / 51 / 666 singular values" in text
    assert "666 is more than d = 576" in text
    for caveat in ("multiplied in TF32", "third setting", "first check below", "Nothing was tuned for RAD-Q"):
        assert caveat in text.split("## Limits")[1]


def test_ranks_without_tf32_need_no_caveat(modules: dict[str, ModuleType], study: Path, tmp_path: Path) -> None:
    assert "TF32" in write(modules, study, tmp_path / "docs")
    shutil.rmtree(study / "expressivity")
    for file in (study / "rank").iterdir():
        write_json(file, json.loads(file.read_text()) | {"tf32": False})
    assert "TF32" not in write(modules, study, tmp_path / "docs")


def test_the_page_holds_texts_and_limits(page: str) -> None:
    assert "| toxicity, −100 | It was | a \\| bad \\*day\\* | fine |" in page
    assert "AUC on unseen texts: toxicity 0.950." in " ".join(page.split("## Limits")[1].split())


@pytest.mark.slow
def test_the_same_study_gives_the_same_files(docs: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(STUDY / "page.py"), str(docs.parent / "study"), "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    files = [file.relative_to(docs) for file in docs.rglob("*.*")]
    assert len(files) == 3
    assert all((docs / file).read_bytes() == (tmp_path / file).read_bytes() for file in files)


def test_the_published_page_is_what_was_measured(tmp_path: Path) -> None:
    run_script(STUDY / "page.py", "study/measured", "--out", str(tmp_path), folder=REPOSITORY)
    assert (tmp_path / "results.md").read_text() == (REPOSITORY / "docs" / "results.md").read_text()
    drawn, published = (
        {file.name for file in (docs / "results").iterdir()} for docs in (tmp_path, REPOSITORY / "docs")
    )
    assert drawn == published


def test_the_published_page_is_short() -> None:
    page = (REPOSITORY / "docs" / "results.md").read_text()
    assert len(page.encode()) <= 12_000
    assert len(re.findall(r"^\d\. ", page, re.MULTILINE)) == 8
    assert len(re.findall(r"^!\[", page, re.MULTILINE)) == 2
    assert len(re.findall(r"^\| (?:sentiment|toxicity), ", page, re.MULTILINE)) == 5
    assert page.index("![") < page.index("## Limits")


def test_parts_that_were_not_run_are_said_to_be_so(modules: dict[str, ModuleType], study: Path, tmp_path: Path) -> None:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "detox-nontoxic.svg").write_text("of an earlier study")
    for part in ("timing.json", "samples.jsonl", "sweeps/sentiment/differences.jsonl"):
        (study / part).unlink()
    shutil.rmtree(study / "sweeps" / "detox-ablations")
    (study / "sweeps" / "detox" / "metrics.jsonl").write_text("")
    page = write(modules, study, tmp_path / "docs")
    rows = claim_rows(page)
    assert rows["distilled RAD-Q is better than GeDi", "detoxification"] == ["not run", "–"]
    assert rows["distilled RAD-Q is better than GeDi", "sentiment, neutral"][0] == "not run"
    assert rows["the MLP head is on par with the linear one", "detoxification"] == ["not run", "–"]
    left = {file.stem for file in (tmp_path / "docs" / "results").iterdir()}
    assert left == {"sentiment-neutral"}


def test_an_empty_study_is_a_page_too(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    rows = claim_rows(write(modules, tmp_path / "study", tmp_path / "docs"))
    assert len(rows) > 15
    assert {verdict for verdict, _ in rows.values()} == {"not run"}


def test_guides_that_never_have_the_same_perplexity(
    modules: dict[str, ModuleType], study: Path, tmp_path: Path
) -> None:
    file = study / "sweeps" / "sentiment" / "differences.jsonl"
    nothing = {"value": None, "low": None, "high": None, "perplexity": None, "reason": "one guide has 1 cells."}
    write_lines(file, [json.loads(line) | nothing for line in file.read_text().splitlines()])
    page = write(modules, study, tmp_path / "docs")
    found = claim_rows(page)["distilled RAD-Q is better than GeDi", "sentiment, neutral"]
    assert found == ["undecided: the two never have the same perplexity", "k = 20: –; k = 40: –"]


def test_a_folder_that_is_not_there(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no folder"):
        modules["claims"].read_study(tmp_path / "nowhere")


def test_a_damaged_file_is_named(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "timing.json").write_text("{")
    with pytest.raises(DataError, match="timing.json' is damaged"):
        modules["claims"].read_study(tmp_path)


# --- what is run ---


def test_the_models_and_sweeps_of_the_study_fit_together(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    models, run = modules["models"].CLAIM_MODELS, modules["run"]
    kinds: dict[bool, Any] = {True: ExpertTrainingConfig, False: RewardTrainingConfig}
    made: set[str] = set()
    for name, model in models.items():
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(model | {"out": f"models/{name}"}))
        config = read_yaml(tmp_path / "config.yaml", kinds["method" in model])
        config.check()
        assert getattr(config, "teacher", "") in {"", *made}  # teachers come first
        made.add(config.out)
    for name in run.SWEEPS:
        sweep = load_sweep(STUDY / "sweeps" / f"{name}.yaml")
        assert {guide.folder for guide in sweep.guides.values()} <= made
        judges = {use.judge.removeprefix("reward:") for use in sweep.judges.values()}
        assert judges <= made | {"onnx:toxicity-bert-tiny"}
        assert all(len(guide.beta) >= 6 for guide in sweep.guides.values())
        assert (sweep.samples, sweep.max_new_tokens) == (25, 20)


def test_a_piece_runs_once_and_says_what_failed(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = modules["models"]
    monkeypatch.chdir(tmp_path)
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).open('a').write('x')"

    def job(name: str, code: str = write, needs: str = "") -> Any:
        return models.Job(name, [sys.executable, "-c", code, name], name, (needs,) if needs else ())

    for _ in range(2):
        models.run_all([job("first"), job("second", needs="first")], 2)
    assert [(tmp_path / name).read_text() for name in ("first", "second")] == ["x", "x"]
    with pytest.raises(SystemExit, match="failed: broken, after it"):
        models.run_all([job("broken", "raise ValueError"), job("after it", needs="broken"), job("third")], 3)
    assert (tmp_path / "third").exists()
    assert not (tmp_path / "after it").exists()
    assert "ValueError" in (tmp_path / "logs" / "broken.log").read_text()


def test_texts_are_of_measured_cells(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    rows = [
        {"cell": cell, "prompt": prompt, "group": "g", "continuations": [f"{cell} {prompt} {n}" for n in range(25)]}
        for cell, prompts in (("whole", 2), ("stopped", 1))
        for prompt in range(prompts)
    ]
    write_lines(tmp_path / "generations.jsonl", rows)
    write_lines(tmp_path / "metrics.jsonl", [{"cell": "whole"}])
    texts = modules["run"].read_texts(tmp_path)
    assert texts == {("whole", "g"): [["whole 0 0", "whole 0 1"], ["whole 1 0", "whole 1 1"]]}


def test_mauve_is_of_cells_that_lack_it(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known cell is not even encoded; unguided texts are, to compare with."""
    pytest.importorskip("mauve")
    run, encoded = modules["run"], []

    class Encoder:
        def encode(self, texts: list[str]) -> np.ndarray:
            encoded.append(texts[0].split()[0])
            return np.random.default_rng(len(texts[0])).normal(size=(len(texts), 4)).astype(np.float32)

    folder, cells = tmp_path / "detox-k20", ("none", "known", "new")
    folder.mkdir()
    rows = [
        {"cell": cell, "group": "g", "prompt": prompt, "continuations": [f"{cell} {n}" for n in range(5)]}
        for cell, prompt in product(cells, range(20))
    ]
    write_lines(folder / "generations.jsonl", rows)
    write_lines(folder / "metrics.jsonl", [{"cell": cell} for cell in cells])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "load_encoder", lambda *_: Encoder())
    run.mauve_of_sweep(folder, {("detox-k20", "none", "g"), ("detox-k20", "known", "g")})
    (row,) = map(json.loads, (tmp_path / "mauve.jsonl").read_text().splitlines())
    assert encoded == ["none", "new"]
    assert (row["sweep"], row["cell"], row["group"]) == ("detox-k20", "new", "g")
    assert 0 <= row["low"] <= row["value"] <= row["high"] <= 1
