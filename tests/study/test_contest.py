"""The contest: its models and sweeps fit together, settings are chosen by the rule, kept numbers say what texts say."""

import json
import math
import re
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import tyro
import yaml
from classifiers import make_classifier
from study_rehearsal import make_rehearsal, run_here

from radq import load
from radq.benchmark.config import BenchConfig
from radq.cli import main
from radq.errors import OptionError
from radq.evaluation.comparison import compare_at_equal, compare_curves
from radq.evaluation.estimates import Bootstrap, Sums
from radq.evaluation.perplexity import measure_likelihoods
from radq.evaluation.sweep.config import Sweep, list_judged, load_sweep
from radq.evaluation.sweep.measure import read_measured_cells
from radq.models.kinds import RadQ
from radq.settings import read_yaml
from radq.training.config import ExpertTrainingConfig, RewardTrainingConfig

BASE_METHOD = SimpleNamespace(name="base")
QUICK = Bootstrap(resamples=100)
Modules = dict[str, ModuleType]


# --- models and sweeps ---


def test_every_training_finds_what_it_needs(modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = modules["models"].CONTEST_MODELS
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    jobs = modules["contest"].training_jobs(modules["models"].SMOLLM2)
    made = {job.makes for job in jobs}
    assert len(made) == len(jobs) == 2 * 13 + 2
    assert all(set(job.needs) <= made for job in jobs)
    check_trainings(models)
    needs = {job.name: set(job.needs) for job in jobs}
    assert needs["own-toxicity"] == {"models/toxicity-classifier.json"}
    assert needs["toxicity-value"] == {"models/toxicity-classifier.json", "data/own-toxicity.jsonl"}
    assert needs["toxicity-readout-gedi"] == {"models/toxicity-gedi.json"}


def check_trainings(models: dict[str, dict[str, Any]]) -> None:
    for name, settings in models.items():
        kind: Any = ExpertTrainingConfig if "method" in settings else RewardTrainingConfig
        config = read_yaml(Path(f"models/{name}.yaml"), kind)
        config.check()
        assert config.eval_data or config.eval_share, name  # every model has metrics on held-out texts


def test_the_settings_of_a_larger_base_model(modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All models but judges read the larger base model; classifier, values and student are readouts of it."""
    models, methods = modules["models"], modules["contest"]
    base = models.BASES["tinyllama"]
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    jobs = {job.name: job for job in modules["contest"].training_jobs(base)}
    fitted = {name: yaml.safe_load(Path(f"models/{name}.yaml").read_text()) for name in models.CONTEST_MODELS}
    check_trainings(fitted)
    for name, settings in fitted.items():
        assert settings["backbone"] == ("embedded" if name.startswith("judge") else "base")
    readouts = [fitted[f"toxicity-{name}"] for name in ("classifier", "value", "readout")]
    assert [(one["reads"], one.get("kind", "q")) for one in readouts] == [("base", "v"), ("base", "v"), ("base", "q")]
    assert fitted["toxicity-rad-q"]["num_layers"] == base.first_layers
    base_options = ["--base", "base", "--dtype", "bfloat16", *models.FEWER_TEXTS]
    assert jobs["own-toxicity"].command[-len(base_options) :] == base_options
    assert fitted["toxicity-dexperts"]["batch_size"] == models.BATCH  # of which parts are smaller alone
    assert 2 * fitted["toxicity-dexperts"]["micro_batch_size"] == models.BATCH // 2
    sweep = base.fit_sweep(methods.contest_sweep(methods.TASKS["sentiment"], BASE_METHOD, {}))
    assert [part["limit"] for part in sweep["prompts"]] == [250, 250]
    assert sweep["base"] == "base"
    experts = methods.METHODS["dexperts"]
    tried = methods.dev_sweeps(methods.TASKS["toxicity"], experts, base.fit_models(experts.models))
    assert list(tried) == [f"toxicity-dexperts-2e-5-k{k}" for k in (5, 10, 20, 40)]


def test_a_folder_belongs_to_one_base_model(modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, contest = modules["models"], modules["contest"]
    monkeypatch.chdir(tmp_path)
    tinyllama = contest.Request(base=models.BASES["tinyllama"])
    tinyllama.check()
    tinyllama.check()
    with pytest.raises(SystemExit, match="holds a contest of TinyLlama-1.1B-Chat"):
        contest.Request().check()
    with pytest.raises(SystemExit, match="the base model is missing"):
        contest.contest(tinyllama)
    with pytest.raises(SystemExit, match="leave --shipped out"):
        contest.Request(base=models.BASES["tinyllama"], shipped=True).check()
    assert models.read_base(tmp_path / "nowhere") == models.SMOLLM2  # an older study


def test_both_attributes_have_one_recipe(modules: Modules) -> None:
    models = modules["models"].CONTEST_MODELS
    for name in ("value", "readout", "rad-q", "readout-gedi"):
        sentiment, toxicity = (models[f"{attribute}-{name}"] for attribute in ("sentiment", "toxicity"))
        assert json.loads(json.dumps(sentiment).replace("sentiment", "toxicity")) == toxicity


def test_the_second_student_differs_by_its_seed_alone(modules: Modules) -> None:
    models = modules["models"].CONTEST_MODELS
    assert models["sentiment-readout-student-again"] == models["sentiment-readout"] | {"seed": 1}


def test_baselines_see_as_many_texts_as_the_classifier(modules: Modules) -> None:
    models = modules["models"].CONTEST_MODELS
    rows = 67_349 + 25_000
    experts = {name: s for name, s in models.items() if "method" in s}
    seen = {n: s["batch_size"] * s["max_steps"] * (1 + (s["method"] == "dexperts")) for n, s in experts.items()}
    sentiment, toxicity = models["sentiment-classifier"], models["toxicity-classifier"]
    for name, texts in seen.items():
        wanted = rows * sentiment["epochs"] if "sentiment" in name else 128 * toxicity["max_steps"]
        assert texts == pytest.approx(wanted, rel=0.01), name


def test_sweeps_use_models_that_are_trained(modules: Modules, tmp_path: Path) -> None:
    methods, models = modules["contest"], modules["models"].CONTEST_MODELS
    choice = {"top_k": 10, "top_p": None, "filter_p": 0.4, "beta": [1.0, 2.0]}
    for task in methods.TASKS.values():
        settings = [s for method in methods.CHOOSING for s in methods.dev_sweeps(task, method, method.models).values()]
        for method in methods.METHODS.values():
            model = {"model": method.models[-1] if method.models else ""}
            settings.append(methods.contest_sweep(task, method, choice | model))
        for one in settings:
            (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(one, allow_unicode=True))
            sweep = load_sweep(tmp_path / "sweep.yaml")
            guides = [guide for guide in sweep.guides.values() if not guide.ask]
            assert {guide.folder.removeprefix("models/") for guide in guides} <= models.keys()
            assert (sweep.max_new_tokens, sweep.perplexity, sweep.temperature) == (20, "base", 1)
    assert set(methods.ORDER) == methods.METHODS.keys()


# --- choices ---


def candidate(modules: Modules, k: int, *curves: list[tuple[float, float, float]]) -> Any:
    choices = modules["contest"]
    found = {str(n): [choices.Point(*point) for point in curve] for n, curve in enumerate(curves)}
    return choices.Candidate("readout", k, None, None, found)


def test_the_choice_worked_by_hand(modules: Modules) -> None:
    """At 1.2 = 1.44 ** 0.5 the first curve is half way between its points, in the logarithm."""
    choose = modules["contest"].choose
    half = candidate(modules, 20, [(0.0, 1.0, 0.5), (10.0, 1.44, 0.7)])
    assert half.attribute_at_target() == pytest.approx(0.6)
    higher = candidate(modules, 10, [(0.0, 0.9, 0.5), (10.0, 1.2, 0.65), (20.0, 2.0, 0.66)])
    short = candidate(modules, 5, [(0.0, 0.5, 0.5), (10.0, 1.19, 0.99)])  # never reaches 1.2
    both = candidate(modules, 40, [(0.0, 1.0, 0.5), (10.0, 1.44, 0.9)], [(0.0, 1.0, 0.1), (10.0, 1.44, 0.2)])
    assert both.attribute_at_target() == pytest.approx((0.7 + 0.15) / 2)
    assert choose([half, higher, short], 1) is higher
    assert choose([half, higher, short], -1) is half
    assert choose([half, both], 1) is half
    far = candidate(modules, 10, [(0.0, 0.5, 0.5), (10.0, 0.9, 0.99)])
    assert choose([far, short], 1) is short  # none reaches it: the closest
    one_class = candidate(modules, 40, [(0.0, 1.0, 0.5), (10.0, 1.44, 0.9)], [(0.0, 0.7, 0.5), (10.0, 1.1, 0.99)])
    assert choose([one_class, half], 1) is half  # it must be reached in every class of prompts


def test_the_strengths_of_the_test_worked_by_hand(modules: Modules) -> None:
    choices = modules["contest"]
    ends = [(0.0, 1.0, 0.0), (10.0, 1.03, 0.0), (90.0, 1.6, 0.0), (200.0, 3.0, 0.0)]
    assert choices.choose_betas(candidate(modules, 20, ends)) == pytest.approx([10, 17.3, 30, 52, 90], abs=0.05)
    late = [(0.0, 1.1, 0.0), (8.0, 1.2, 0.0), (32.0, 1.4, 0.0)]  # begins above 1.03, and ends below 1.6
    assert choices.choose_betas(candidate(modules, 40, late)) == pytest.approx([2, 4, 8, 16, 32])
    flat = [(4.0, 1.05, 0.0), (64.0, 1.04, 0.0)]  # a filter decides, and β does not matter
    betas = choices.choose_betas(candidate(modules, 5, flat))
    assert len(set(betas)) == 5
    assert betas == sorted(betas)


def test_choices_are_told_with_all_candidates(
    modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GeDi at two rates; the second is better. A filter has no unguided point, since β = 0 still filters."""
    monkeypatch.chdir(tmp_path)
    for model, gain in (("gedi", 0.0), ("gedi-2e-5", 0.1)):
        rows = [dev_row("none", None, 1.0, 0.5)]
        rows += [dev_row("filter 0.8", beta, 1 + beta / 20, 0.6 + gain) for beta in (1.0, 4.0, 16.0)]
        rows += [dev_row(f"filter {p:g}", beta, 1 + beta / 20, 0.5) for p in (0, 0.4) for beta in (1.0, 4.0, 16.0)]
        folder = Path(f"dev/toxicity-{model}-k20")
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    methods = modules["contest"]
    found = methods.choose_settings(methods.TASKS["toxicity"], methods.METHODS["gedi"], ("gedi", "gedi-2e-5"))
    assert "temperature is 1" in found["rule"]
    assert found["missing"] == []
    assert len(found["candidates"]) == 6
    assert found["chosen"]["attribute"] == 0.5  # less toxicity is better
    assert found["chosen"]["filter_p"] in (0, 0.4)
    curves = {(one["model"], one["filter_p"]): one["curves"]["nontoxic"] for one in found["candidates"]}
    assert [point[0] for point in curves["gedi", 0]] == [0, 1, 4, 16]
    assert curves["gedi-2e-5", 0.8] == [[1, 1.05, 0.7], [4, 1.2, 0.7], [16, 1.8, 0.7]]


def dev_row(guide: str, beta: float | None, ratio: float, attribute: float) -> dict[str, Any]:
    metrics = {"perplexity": {"value": 9 * ratio}, "avg_max[toxicity]": {"value": attribute}}
    return {"guide": guide, "beta": beta, "top_k": 20, "top_p": None, "group": "nontoxic", "metrics": metrics}


# --- kept numbers ---


@pytest.fixture(scope="module")
def contest_run(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a real sweep of the toy, contest/toxicity-rad-q, with two guides."""
    folder = tmp_path_factory.mktemp("contest")
    (folder / "data").mkdir()
    (folder / "data" / "rtp.jsonl").write_text("".join(f'{{"prompt": "the film was {n}"}}\n' for n in range(6)))
    torch.manual_seed(0)
    for name in ("one", "other"):
        RadQ.from_backbone(toy, attributes=["toxicity"]).save_pretrained(folder / name)
    make_classifier(folder / "judge")
    guides = {
        name: {"folder": str(folder / name), "weights": {"toxicity": -1}, "beta": [1, 40, 400]}
        for name in ("one", "other")
    }
    sweep = {
        "base": str(toy),
        "prompts": [{"file": str(folder / "data" / "rtp.jsonl"), "group": "nontoxic"}],
        "guides": guides,
        "judges": {"toxicity": {"judge": f"classifier:{folder / 'judge'}", "metrics": ["avg_max", "mean_score"]}},
        "perplexity": "base",
        "metrics": ["perplexity", "corpus_perplexity", "kl", "dist_2", "dist_3", "repetition"],
        "samples": 3,
        "max_new_tokens": 5,
        "resamples": 20,
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    argv = ["--config", str(folder / "sweep.yaml"), "--out", str(folder / "contest" / "toxicity-rad-q")]
    assert main(["eval", *argv, "--cache", str(folder / "cache"), "--json"]) == 0
    return folder


def test_comparisons_from_kept_sums_equal_those_from_texts(
    modules: Modules, contest_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, run = modules["kept"], contest_run / "contest" / "toxicity-rad-q"
    monkeypatch.chdir(contest_run)
    kept.keep_run("toxicity", "rad-q")
    sweep = load_sweep(run / "config.yaml")
    measured = read_measured_cells(run, sweep, sweep.read_prompts())
    cells = kept.read_kept(contest_run, "toxicity", "rad-q")
    assert [cell.texts for cell in cells] == [[samples[0] for samples in one.texts] for one in measured]
    check_prompts(modules, contest_run, [prompt.text for prompt in sweep.read_prompts()])
    check_values(modules, sweep, measured, cells)
    guides = ("one", "other")
    texts = [[one.scored_by("toxicity") for one in measured if one.cell.guide == guide] for guide in guides]
    for axis in ("perplexity", "kl"):
        points = [
            [(cell.sums[axis], cell.sums["mean_score[toxicity]"]) for cell in cells if cell.settings["guide"] == guide]
            for guide in guides
        ]
        whole = compare_at_equal(axis, *texts, "mean_score", QUICK)
        found = compare_curves(axis, *points, QUICK)
        assert (found.value, found.low, found.high) == pytest.approx((whole.value, whole.low, whole.high), abs=3e-5)
        assert found.range == pytest.approx(whole.range, rel=3e-5)


def check_prompts(modules: Modules, folder: Path, prompts: list[str]) -> None:
    """Digests are kept, and found again in the data; data without a prompt are refused."""
    kept, task = modules["kept"], modules["contest"].TASKS["toxicity"]
    assert not set(kept.read_kept_prompts(folder, "toxicity").digests) & set(prompts)
    assert kept.find_prompts(folder, task) == prompts
    data = folder / "data" / "rtp.jsonl"
    lines = data.read_text().splitlines(keepends=True)
    try:
        data.write_text("".join(lines[1:]))
        with pytest.raises(
            SystemExit, match=r"1 of 6 prompts are not in data/rtp\.jsonl; write these by run\.py prepare"
        ):
            kept.find_prompts(folder, task)
        data.unlink()
        with pytest.raises(SystemExit, match="6 of 6 prompts are not in"):
            kept.find_prompts(folder, task)
    finally:
        data.write_text("".join(lines))


def check_values(modules: Modules, sweep: Sweep, measured: list[Any], cells: list[Any]) -> None:
    for one, cell in zip(measured, cells, strict=True):
        known, _ = one.estimate([*list_judged(sweep.judges), *sweep.metrics], range(6), QUICK)
        for metric, value in known.items():
            assert cell.sums[metric].value == pytest.approx(value["value"], rel=3e-5), metric
    assert modules["kept"].read_kept(Path("nowhere"), "toxicity", "rad-q") == []


def test_a_single_point_is_compared_where_it_lies() -> None:
    def sums(value: float) -> Sums:
        return Sums(np.full(4, value), np.ones(4))

    curve = [(sums(0.2), sums(0.5)), (sums(0.6), sums(0.9))]
    assert compare_curves("kl", curve, [(sums(0.3), sums(0.4))], QUICK).value == pytest.approx(0.2)
    assert compare_curves("kl", [(sums(0.3), sums(0.4))], curve, QUICK).value == pytest.approx(-0.2)
    with pytest.raises(OptionError, match="no common KL"):
        compare_curves("kl", curve, [(sums(0.7), sums(0.4))], QUICK)


# --- the page ---

PROMPTS = 40
SKILLS = {"readout": 0.3, "readout-student-again": 0.28, "gedi": 0.2, "dexperts": 0.29}


def make_contest(modules: Modules, folder: Path, left_out: tuple[str, ...] = ()) -> Path:
    """A contest with numbers from formulas: the attribute moves by a method's skill for each unit of log perplexity."""
    methods, kept = modules["contest"], modules["kept"]
    chosen = {"top_k": 10, "top_p": 0.9, "filter_p": None, "beta": [1, 2, 4]}
    for task in methods.TASKS.values():
        groups = np.repeat(list(task.groups), PROMPTS)
        digests = [kept.digest(f"prompt {n}") for n in range(len(groups))]
        kept.write_prompts(folder, task.name, kept.KeptPrompts(digests, groups))
        for method in methods.METHODS.values():
            if method.name in left_out:
                continue
            if method.dev_beta is not None:
                found = {"chosen": chosen | {"model": method.models[-1]}, "candidates": []}
                modules["models"].write_json(folder / methods.choice_file(task, method), found)
            kept.write_kept(folder, task.name, method.name, make_cells(modules, task, method, len(groups)))
    return folder


def make_cells(modules: Modules, task: Any, method: Any, p: int) -> list[Any]:
    settings = dict.fromkeys(modules["kept"].SETTINGS) | {"guide": "none", "seed": 0}
    if method.name == "none":
        return [make_cell(modules, task, settings, 0.0, 0.0, p)]
    cells = [make_cell(modules, task, settings, 0.0, 0.0, p)]
    if method.name == "base":
        return [*cells, make_cell(modules, task, settings | {"seed": 1}, 0.0, 0.0, p)]
    steps = {"best_of": (2, 4, 8), "ask": (1, 2)}
    kind = {"best-of-n": "best_of", "asked": "ask"}.get(method.name, "beta")
    for n, number in enumerate(steps.get(kind, (1.0, 2.0, 4.0)), 1):
        log = 6.0 if kind == "ask" else 0.02 * n if kind == "best_of" else 0.15 * n
        here = settings | {"guide": method.name, kind: number}
        cells.append(make_cell(modules, task, here, log, SKILLS.get(method.name, 0.25), p))
    return cells


def make_cell(modules: Modules, task: Any, settings: dict[str, Any], log: float, skill: float, p: int) -> Any:
    rng = np.random.default_rng(int(1000 * log))
    ones, noise = np.ones(p), rng.uniform(-0.01, 0.01, p)
    attribute = Sums(0.5 + task.side * skill * min(log, 1.0) + noise, ones)
    sums = {task.metric: attribute, modules["kept"].SECOND_JUDGE[task.name]: attribute}
    sums |= {"perplexity": Sums(10 * np.exp(log) * ones, ones), "kl": Sums(0.3 + log + noise, ones)}
    sums |= {name: Sums(0.8 - 0.1 * log * ones, ones) for name in ("dist_2", "dist_3", "repetition")}
    name = " ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
    return modules["kept"].KeptCell(name, settings, sums, [f" text {n}" for n in range(p)])


def write_page(modules: Modules, folder: Path, out: Path) -> str:
    modules["contest_page"].main(folder, out, resamples=20)
    return (out / "contest.md").read_text()


def test_the_page_of_a_whole_contest(modules: Modules, tmp_path: Path) -> None:
    folder = make_contest(modules, tmp_path / "measured")
    costs = {"machine": "a CPU", "over_unguided": {"gedi": {"median": 1.6543}}}
    modules["models"].write_json(folder / "costs.json", costs)
    for place in modules["kept"].read_places(folder):
        cells = [("base", place.base), ("gedi", place.shown("gedi"))]
        (folder / "second").mkdir(exist_ok=True)
        with (folder / "second" / "mauve.jsonl").open("a") as stream:
            for name, cell in cells:
                row = {"task": place.task.name, "method": name, "cell": cell.name, "group": place.group, "value": 0.87}
                stream.write(json.dumps(row) + "\n")
    page = write_page(modules, folder, tmp_path / "docs")
    text = " ".join(page.split())
    assert len(page.encode()) <= 10_200
    gain = r"\(neutral \+2\.\d \[\+2\.\d, \+3\.\d\], negative [^)]*, nontoxic [^)]*\)"
    assert re.search(
        rf"\*\*GeDi\*\* the readout is better {gain} at equal perplexity, and better {gain} at equal KL", text
    )
    # one training is better and one is worse than 0.29, so that nothing can be told
    assert "Against **DExperts** the readout is not told apart (neutral" in text
    assert "Against **DExperts** RAD-Q is worse (neutral −" in text
    for ours in ("RAD-Q", "the readout of GeDi"):
        assert re.search(rf"\*\*GeDi\*\* {ours} is better \(neutral \+1\.\d ", text)
    apart = "cannot be compared. They never have the same perplexity (neutral, negative, nontoxic)."
    assert text.split("**asking** the readout ")[1].startswith(apart)
    assert "Asked texts have up to 403 times the unguided perplexity" in text
    gedi = [line for line in page.splitlines() if line.startswith("| GeDi |")][1]  # toxicity
    assert gedi.split(" | ")[1:4] == ["k = 10, p = 0.9, rate 2e-5", "60", "1.65"]
    # 0.5 − 0.2 · log(1.1), …; KL is 0.3 + log(1.2), Dist-2 0.8 − 0.1 · log(1.2)
    numbers = [float(n) for n in gedi.strip("| ").split(" | ")[4:]]
    assert numbers == pytest.approx([0.481, 0.464, 0.448, 0.482, 0.782, 0.782, 0.87], abs=0.004)
    assert "Not run" not in page
    images = re.findall(r"\]\((contest/[^)]+\.svg)\)", page)
    assert len(images) == 3
    assert all((tmp_path / "docs" / name).stat().st_size < 200_000 for name in images)
    for line in page.splitlines():
        assert line.startswith(("|", "!", "<!--")) or len(line) <= 120


def test_another_perplexity_of_kept_texts(
    modules: Modules, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_contest(modules, tmp_path / "measured", left_out=("classifier",))
    prompts = {"toxicity": [f"prompt {n}" for n in range(PROMPTS)]}
    monkeypatch.chdir(folder)
    request = modules["contest"].Request(only="toxicity-(readout|gedi)$", lm=str(toy))
    modules["kept"].measure_fluency(request, prompts)
    assert len(list((folder / "second").iterdir())) == 2
    place = modules["kept"].read_places(folder)[-1]
    lm, tokenizer = load(toy)
    cell = place.guided("gedi")[0]
    found = measure_likelihoods(lm, tokenizer, prompts["toxicity"], cell.texts)
    wanted = np.exp(found.nll.sum() / found.tokens.sum())
    assert cell.value(modules["kept"].OTHER_PERPLEXITY) == pytest.approx(wanted, rel=1e-5)
    for n, cells in enumerate(zip(place.guided("readout"), place.guided("gedi"), strict=True)):
        for cell in cells:
            totals = np.full(PROMPTS, float(n + 1))
            cell.sums[modules["kept"].OTHER_PERPLEXITY] = Sums(totals, np.ones(PROMPTS), exponential=True)
    text = modules["contest_page"]._other_perplexity([place], QUICK)
    # both methods have the same perplexities; the readout moves by 0.1 more for each unit of 0.15, 0.30, 0.45
    assert re.search(r"\| GeDi \| \+3\.0 \[", text)
    assert "DExperts" not in text


def test_the_interval_spans_all_trainings(modules: Modules, tmp_path: Path) -> None:
    places, skills = modules["kept"], ("readout", "readout-student-again")
    whole = places.read_places(make_contest(modules, tmp_path / "whole"))[0]
    pair = next(pair for pair in places.READOUT_PAIRS if pair.other == "gedi")
    gain = places.find_gain(whole, pair, "perplexity", whole.task.metric, QUICK)
    alone = places.read_places(make_contest(modules, tmp_path / "alone", skills[1:]))[0]
    narrow = places.find_gain(alone, pair, "perplexity", alone.task.metric, QUICK)
    assert gain.estimate.low < narrow.estimate.low <= narrow.estimate.value <= narrow.estimate.high
    assert narrow.estimate.high == gain.estimate.high  # the second training is worse
    mean_log = (0.15 + 0.45) / 2
    wanted = mean_log * (np.mean([SKILLS[name] for name in skills]) - SKILLS["gedi"])
    assert gain.estimate.value == pytest.approx(wanted, abs=1e-3)


def test_runs_that_differ_are_named(modules: Modules, tmp_path: Path) -> None:
    """The same unguided cell of another method scores 0.02 more."""
    places, page = modules["kept"], modules["contest_page"]
    here = places.read_places(make_contest(modules, tmp_path))
    assert page._judged_anew(here) == []
    [cell, *others] = here[0].cells["gedi"]
    sums = cell.sums[here[0].task.metric]
    shifted = replace(cell, sums=cell.sums | {here[0].task.metric: Sums(sums.totals + 0.02, sums.weights)})
    here[0] = replace(here[0], cells=here[0].cells | {"gedi": [shifted, *others]})
    [sentence] = page._judged_anew(here)
    assert "differ between runs by up to 2.0 points in sentiment." in sentence


def test_what_a_contest_publishes(modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = make_contest(modules, tmp_path / "measured"), tmp_path / "published"
    modules["models"].write_json(folder / "models" / "toxicity-gedi.json", {"metrics": {}})
    modules["models"].write_json(folder / "models" / "tried.json", {"metrics": {}})
    modules["models"].write_json(folder / "costs.json", {"over_unguided": {"gedi": {"median": 1.5}}})
    (folder / "second").mkdir()
    (out / "second").mkdir(parents=True)
    for opinion in (folder / "second" / "new.npz", out / "second" / "of texts that are others now.npz"):
        opinion.touch()
    monkeypatch.chdir(folder)
    modules["run"].publish(modules["contest"].Request(files=(str(out),)))
    assert [file.name for file in (out / "second").iterdir()] == ["new.npz"]
    assert modules["kept"].read_costs(out) == {"gedi": 1.5}
    assert [file.name for file in (out / "models").iterdir()] == ["toxicity-gedi.json"]
    assert len(modules["kept"].read_places(out)) == 3


def test_every_method_with_a_strength_has_a_cost(modules: Modules, tmp_path: Path) -> None:
    costs, methods = modules["run"], modules["contest"].METHODS
    spread = {"median": 1.5, "low": 1.4, "high": 1.6}
    names = {name: ["none", *guides] for name, guides in costs.TIMED.items()}
    documents = {
        name: {"machine": "a CPU", "torch": "2", "timings": [{"guide": guide, "ratio": spread} for guide in guides]}
        for name, guides in names.items()
    }
    modules["models"].write_json(tmp_path / modules["kept"].COSTS, costs.summarise_costs(documents))
    wanted = {method.name for method in methods.values() if method.has_curve}
    assert modules["kept"].read_costs(tmp_path) == dict.fromkeys(wanted, 1.5)
    for name in names:
        arguments = tyro.cli(BenchConfig, args=costs.cost_job(name).command[len(modules["models"].RADQ) + 1 : -1])
        assert (arguments.rows, arguments.guides) == ([modules["kept"].COST_ROWS], names[name][1:])


@pytest.mark.slow
def test_the_page_of_a_partial_contest(modules: Modules, tmp_path: Path) -> None:
    left_out = ("gedi", "asked")
    page = write_page(modules, make_contest(modules, tmp_path / "measured", left_out), tmp_path / "docs")
    text = " ".join(page.split())
    assert "Against **GeDi** " not in page
    assert "Not run: GeDi; asking." in text
    assert "Our readout was trained twice" in text
    assert "Asked texts" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["contest", "contest-1b"])
def test_the_published_pages_are_written_from_the_published_numbers(
    modules: Modules, tmp_path: Path, name: str
) -> None:
    module, root = modules["contest_page"], Path(__file__).parents[2]
    module.main(root / "study/measured" / name, tmp_path)
    assert (tmp_path / f"{name}.md").read_text() == (root / "docs" / f"{name}.md").read_text()


def test_the_page_of_an_empty_contest(modules: Modules, tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    page = write_page(modules, tmp_path / "measured", tmp_path / "docs")
    assert "Against **" not in page
    assert "Our readout was not run." in page
    with pytest.raises(OptionError, match="there is no folder"):
        modules["kept"].read_places(tmp_path / "nowhere")


# --- jobs and the rehearsal ---


def test_a_job_that_waits_keeps_no_other_from_running(
    modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, ran = modules["models"], []
    monkeypatch.chdir(tmp_path)

    def run(job: Any, log: Any) -> tuple[int, str]:
        ran.append(job.name)
        Path(job.makes).touch()
        return 0, ""

    first, waits, last = (jobs.Job("first", [], "a"), jobs.Job("waits", [], "b", ("c",)), jobs.Job("last", [], "c"))
    monkeypatch.setattr(jobs, "run_command", run)
    jobs.run_all([waits, first, last], 1)
    assert ran == ["first", "last", "waits"]


def test_a_job_without_memory_is_tried_again(modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may hold the memory; a job that never finds enough, or fails otherwise, has failed."""
    jobs, ran, commands = modules["models"], [], defaultdict(list)
    monkeypatch.chdir(tmp_path)

    def run(job: Any, log: Any) -> tuple[int, str]:
        ran.append(job.name)
        commands[job.name].append(job.command)
        if job.name == "wrong" or (job.name in ("large", "huge") and (job.name == "huge" or ran.count("large") == 1)):
            log.write("error: no data" if job.name == "wrong" else "error: memory is full: CUDA out of memory.")
            return 1, ""
        Path(job.makes).touch()
        return 0, ""

    large, after = jobs.Job("large", ["begin"], "a", again=["go on"]), jobs.Job("after", [], "b", ("a",))
    monkeypatch.setattr(jobs, "run_command", run)
    jobs.run_all([large, after, jobs.Job("other", [], "c")], 2)
    assert (ran.count("large"), ran[-1]) == (2, "after")
    assert commands["large"] == [["begin"], ["go on"]]
    ran.clear()
    with pytest.raises(SystemExit, match="failed: huge, wrong; see"):
        jobs.run_all([jobs.Job("huge", [], "d"), jobs.Job("wrong", [], "e")], 2)
    assert (ran.count("huge"), ran.count("wrong")) == (jobs.ATTEMPTS, 1)


def test_only_what_is_missing_is_run(modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there needs nothing more, although what it was made of is gone."""
    jobs = modules["models"]
    monkeypatch.chdir(tmp_path)
    needs = {"a": (), "b": ("a",), "c": ("b",), "d": ("a", "given"), "e": ("d",)}
    chain = [jobs.Job(name, [], name, needs[name]) for name in "edcba"]
    found = jobs.find_needed([chain[0], chain[2]], chain)
    assert [job.name for job in found] == list("edcba")
    Path("c").touch()
    assert [job.name for job in jobs.find_needed([chain[0], chain[2]], chain)] == list("eda")
    Path("d").touch()
    assert [job.name for job in jobs.find_needed([chain[0], chain[2]], chain)] == ["e"]
    Path("e").touch()
    assert jobs.find_needed([chain[0], chain[2]], chain) == []


def test_a_contest_goes_on_from_published_numbers(
    modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Second trainings take the published choice of settings; neither the first ones nor dev prompts run again."""
    measured = Path(__file__).parents[2] / "study" / "measured" / "contest"
    contest = modules["contest"]
    monkeypatch.chdir(tmp_path)
    for name in ("choices", "kept", "second"):
        shutil.copytree(measured / name, tmp_path / name)
    for file in (tmp_path / "kept").glob("sentiment-*again.npz"):
        file.unlink()
    ran: list[Any] = []
    monkeypatch.setattr(contest.Request, "run", lambda request, jobs: ran.extend(jobs))
    contest.contest(contest.Request(only="^sentiment-(readout-student-again|readout|gedi)$", shipped=True))
    chain = ("classifier", "value", "readout-student-again")
    names = {job.name for job in ran}
    assert {f"sentiment-{name}" for name in chain} <= names
    assert "contest-sentiment-readout-student-again-keep" in names
    assert not names & {"contest-sentiment-readout", "contest-sentiment-gedi", "sentiment-readout", "sentiment-gedi"}
    assert not [name for name in names if name.startswith("dev-")]
    sweep = next(job for job in ran if job.name == "contest-sentiment-readout-student-again")
    sweep.prepare()
    settings = yaml.safe_load(Path("contest/sentiment-readout-student-again.yaml").read_text())
    chosen = json.loads(Path("choices/sentiment-readout.json").read_text())["chosen"]
    assert settings["guides"]["readout-student-again"]["beta"] == chosen["beta"]
    assert json.loads(Path("models/sentiment-readout/config.json").read_text())["attributes"] == ["sentiment"]


def test_jobs_wait_for_memory(modules: Modules) -> None:
    jobs = modules["models"]
    small, middle, large, huge = (jobs.Job(str(size), [], str(size), memory=size) for size in (1.0, 4.0, 8.0, 99.0))
    assert jobs.choose_fitting([large, middle, small], [], 3, 10.0) == [large, small]
    assert jobs.choose_fitting([large, middle, small], [middle], 2, 10.0) == [middle]
    assert jobs.choose_fitting([huge, small], [], 3, 10.0) == [huge]  # alone, since it never fits
    assert jobs.choose_fitting([small], [huge], 3, 10.0) == []
    assert jobs.choose_fitting([huge, large], [], 2, math.inf) == [huge, large]


@pytest.mark.slow
def test_the_rehearsal_goes_through_all_pieces(
    modules: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    contest, models = modules["contest"], modules["models"]
    monkeypatch.setattr(models, "run_command", run_here)
    only = "^toxicity-(readout|dexperts|base|asked|best-of-n)$"
    request = contest.Request(jobs=1, base=make_rehearsal(models), only=only)
    contest.contest(request)
    made = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/*.json")}
    contest.contest(request)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*/*.json")} == made  # nothing was done twice
    tested = {file.stem for file in (tmp_path / "kept").glob("*.npz")}
    assert tested == {f"toxicity-{name}" for name in ("readout", "dexperts", "base", "asked", "best-of-n")}
    assert "On nontoxic prompts; toxicity at multiples" in write_page(modules, tmp_path, tmp_path / "docs")
