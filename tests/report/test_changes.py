"""The beginning of a report: each guide against the unguided base model, in words that agree with their intervals."""

from math import isnan
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folders import lines_of, make_result, make_run, write_lines

from radq.evaluation.estimates import TRUSTED_PROMPTS, Estimate
from radq.report.curves import (
    Change,
    change_table,
    count_group,
    describe_changes,
    describe_run,
    find_changes,
    name_group,
    warn_of_few_prompts,
)
from radq.report.results import NAN, Result, Run, read_runs


def make_cell(score: float, perplexity: float, **fields: object) -> Result:
    known = {"positive_rate[mood]": Estimate(score, NAN, NAN), "perplexity": Estimate(perplexity, NAN, NAN)}
    return make_result(metrics=known, **fields)


def make_summary(*results: Result, config: str | None = None) -> Run:
    return Run("run", Path("run"), config, list(results), [])


# --- guided against unguided ---


def test_a_guide_is_shown_at_its_strongest_beta_with_a_fair_perplexity() -> None:
    run = make_summary(
        make_cell(0.5, 10, guide="none", unguided=True, beta=None),
        make_cell(0.2, 12, beta=-20.0, prompts=40, changes={"positive_rate[mood]": Estimate(-0.3, -0.4, -0.2)}),
        make_cell(0.4, 11, beta=-10.0),
        make_cell(0.1, 15.1, beta=-50.0),
        make_cell(0.9, 16, guide="dear", beta=1.0),
        make_cell(0.95, 17, guide="dear", beta=2.0),
    )
    found = find_changes(run)
    assert [(change.guide, change.step, change.metric) for change in found] == [
        ("rad-q", "β = -20", "positive_rate[mood]"),
        ("rad-q", "β = -20", "perplexity"),
        ("dear", "β = 1", "positive_rate[mood]"),
        ("dear", "β = 1", "perplexity"),
    ]
    assert found[0].difference == Estimate(-0.3, -0.4, -0.2)
    assert (found[1].unguided, found[1].guided, found[1].difference.value) == (10, 12, 2)
    assert isnan(found[1].difference.low)  # a run of an older version
    assert describe_changes(found) == [
        "rad-q at β = -20 lowers positive_rate[mood] from 0.500 (unguided) to 0.200 on 40 all prompts "
        "(−0.300 [−0.400, −0.200]), at 1.20 times the unguided perplexity.",
        "dear at β = 1 raises positive_rate[mood] from 0.500 (unguided) to 0.900 on all prompts "
        "(+0.400; there is no interval), at 1.60 times the unguided perplexity.",
    ]
    assert [entry.text for entry in change_table(found).rows[0]] == [
        *("rad-q", "β = -20", "40 all prompts", "positive_rate[mood]", "0.500", "0.200", "−0.300")
    ]


def test_unguided_texts_have_the_same_candidates_and_seeds_are_averaged() -> None:
    run = make_summary(
        *(make_cell(k / 100, 10, guide="none", unguided=True, beta=None, top_k=k) for k in (20, 40)),
        *(make_cell(0.8 + seed / 10, 10, top_k=k, seed=seed) for k in (20, 40) for seed in (0, 1)),
        make_cell(0.9, 10, guide="best", beta=None, best_of=5, top_k=40),
        make_cell(0.9, 10, guide="lonely", top_k=60),
    )
    found = [change for change in find_changes(run) if change.metric != "perplexity"]
    assert [(change.guide, change.step, change.unguided) for change in found] == [
        ("rad-q, k=20", "β = 10", 0.2),
        ("rad-q, k=40", "β = 10", 0.4),
        ("best, k=40", "n=5", 0.4),
    ]
    assert found[0].guided == pytest.approx(0.85)


def test_without_perplexity_the_strongest_beta_is_shown() -> None:
    scores = [{"mean_score[mood]": Estimate(score, NAN, NAN)} for score in (0.5, 0.6, 0.7)]
    unguided = make_result(guide="none", unguided=True, beta=None, metrics=scores[0])
    run = make_summary(unguided, *(make_result(beta=10.0 * n, metrics=scores[n]) for n in (1, 2)))
    assert describe_changes(find_changes(run)) == [
        "rad-q at β = 20 raises mean_score[mood] from 0.500 (unguided) to 0.700 on all prompts "
        "(+0.200; there is no interval)."
    ]


# --- words ---


@given(st.tuples(*[st.floats(-1, 1)] * 3).map(sorted), st.none() | st.integers(1, 100))
@settings(deadline=None)
def test_few_prompts_never_decide(numbers: list[float], prompts: int | None) -> None:
    low, value, high = numbers
    excludes = not low <= 0 <= high
    few = prompts is not None and prompts < TRUSTED_PROMPTS
    doubt = Estimate(value, low, high).doubt(prompts)
    assert (doubt == "") == (excludes and not few)
    assert ("too few to tell" in doubt) == few
    assert ("includes 0" in doubt) == (not excludes and not few)
    change = Change("g", "", "all", prompts, "avg_max", 0.5, 0.5 + value, Estimate(value, low, high))
    (sentence,) = describe_changes([change])
    assert (", but not clearly" in sentence) == bool(doubt)
    assert (" raises " in sentence or " lowers " in sentence) <= (not doubt)
    assert sentence.endswith(").")
    assert ". " not in sentence  # one sentence


@pytest.mark.parametrize(
    ("group", "name"),
    [("neutral", "neutral prompts"), ("prompts", "prompts"), ("My Prompts, k=20", "My Prompts, k=20")],
)
def test_classes_are_not_called_prompts_twice(group: str, name: str) -> None:
    assert name_group(group) == name
    assert count_group(group, 5) == f"5 {name}"


@pytest.mark.parametrize(("prompts", "warned"), [(TRUSTED_PROMPTS - 1, True), (TRUSTED_PROMPTS, False), (None, False)])
def test_small_classes_are_noted(prompts: int | None, warned: bool, tmp_path: Path) -> None:
    (run,) = read_runs([make_run(tmp_path / "run", {"rad-q": 1.0}, groups=("all",), prompts=prompts)])
    assert bool(warn_of_few_prompts(run)) == warned


# --- the models and prompts ---


def test_facts_of_a_run(tmp_path: Path) -> None:
    config = (
        "base: embedded\nperplexity: base\njudges:\n  mood: {judge: 'linear:embedded:sentiment', reads: text}\n"
        "  tone: {judge: 'onnx:tone'}\n"
    )
    (run,) = read_runs([make_run(tmp_path / "run", {"rad-q": 1.0}, groups=("prompts",), config=config)])
    assert describe_run(run) == [
        ("base model", "embedded (SmolLM2-135M-Instruct)"),
        ("judge", "mood = linear:embedded:sentiment, reads prompts and continuations; tone = onnx:tone"),
        ("perplexity under", "the base model"),
        ("prompts", "100 prompts, 6 samples of each"),
        ("guides", "none, rad-q"),
    ]


@pytest.mark.parametrize("config", [None, "- a", "a: [", "judges: 3", "judges: {a: 3}", "judges: {a: {reads: [1]}}"])
def test_odd_configurations(config: str | None, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"rad-q": 1.0}, groups=("all",), config=config or "")
    if config is None:
        (folder / "config.yaml").unlink()
        write_lines(folder / "metrics.jsonl", [row | {"samples": None} for row in lines_of(folder / "metrics.jsonl")])
    facts = dict(describe_run(read_runs([folder])[0]))
    assert facts["guides"] == "none, rad-q"
    assert "base model" not in facts
