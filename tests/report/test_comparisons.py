"""Our guide against others: the words agree with the intervals, and nothing is said that the run does not hold."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folders import lines_of, make_result, make_run, svg_texts, write_lines

from radq.errors import DataError
from radq.evaluation.estimates import TRUSTED_PROMPTS, Estimate
from radq.report.comparisons import (
    compare_with_others,
    comparison_table,
    describe_comparisons,
    explain_better,
    find_better_side,
    find_missing,
)
from radq.report.plots import plot_comparisons
from radq.report.results import NAN, Comparison, Result, Run, read_runs

ONE = Comparison("run", "rad-q", "gedi", "avg_max", "all", Estimate(0.02, 0.01, 0.03), (11.0, 20.0), 100, -1, "")


def make_cell(score: float, half: float = 0.01, **fields: object) -> Result:
    return make_result(metrics={"avg_max": Estimate(score, score - half, score + half)}, **fields)


UNGUIDED = make_cell(0.5, guide="none", unguided=True, beta=None)


# --- words ---


@given(st.tuples(*[st.floats(-1, 1)] * 3).map(sorted), st.sampled_from([-1, 0, 1]), st.none() | st.integers(1, 100))
@settings(deadline=None)
def test_better_and_worse_are_what_the_interval_says(numbers: list[float], side: int, prompts: int | None) -> None:
    low, value, high = numbers
    one = replace(ONE, difference=Estimate(value, low, high), better_side=side, prompts=prompts)
    few = prompts is not None and prompts < TRUSTED_PROMPTS
    if few or low <= 0 <= high:
        assert one.word == "not told apart from"
        assert one.doubt in one.verdict
    else:
        above = low > 0
        wanted = {0: ("lower", "higher"), 1: ("worse", "better"), -1: ("better", "worse")}[side][above]
        assert one.verdict == f"{wanted} than gedi"
    turned = replace(one, difference=Estimate(-value, -high, -low))
    opposite = {"better": "worse", "worse": "better", "higher": "lower", "lower": "higher"}
    word = one.word.removesuffix(" than")
    assert turned.word.removesuffix(" than") == opposite.get(word, word)


def test_one_sentence_names_every_guide() -> None:
    numbers = {"gedi": (0.01, 0.03), "mlp": (-0.03, -0.01), "rad-v": (-0.01, 0.02), "dexperts": (0.02, 0.03)}
    compared = [replace(ONE, other=n, difference=Estimate(sum(e) / 2, *e)) for n, e in numbers.items()]
    compared += [replace(one, metric="toxic_rate") for one in compared]
    lost = replace(ONE, other="lost", difference=Estimate(NAN, NAN, NAN), reason="one curve has 1 point")
    assert describe_comparisons([*compared, lost]) == [
        "At equal perplexity rad-q is better than mlp, is worse than gedi and dexperts, and it cannot be told apart "
        "from rad-v in avg_max on all prompts."
    ]
    assert describe_comparisons([lost]) == []
    assert lost.verdict == "not compared with lost: one curve has 1 point"
    assert replace(lost, reason="").verdict == "not compared with lost: the run gives no reason"
    few = replace(ONE, prompts=5)
    assert describe_comparisons([few]) == [
        "5 prompts are too few to compare rad-q with gedi in avg_max on all prompts."
    ]
    assert [entry.text for entry in comparison_table([ONE]).rows[0]] == [
        *("rad-q", "worse than gedi", "avg_max", "all", "+0.020", "perplexity 11.00 – 20.00")
    ]


def test_each_axis_has_a_sentence() -> None:
    at_kl = replace(ONE, axis="kl", difference=Estimate(-0.02, -0.03, -0.01), range=(0.1, 0.5))
    assert describe_comparisons([ONE, at_kl]) == [
        "At equal perplexity rad-q is worse than gedi in avg_max on all prompts.",
        "At equal KL rad-q is better than gedi in avg_max on all prompts.",
    ]
    assert comparison_table([at_kl]).rows[0][-1].text == "KL 0.100 – 0.500"
    unknown = replace(at_kl, range=(NAN, NAN))
    assert comparison_table([unknown]).rows[0][-1].text == "KL"
    plot = plot_comparisons("differences", [ONE, at_kl], ["rad-q", "gedi"])
    assert plot is not None
    assert plot.title == "rad-q against other guides at equal perplexity and at equal KL"
    assert "minus the other guide at equal KL" in svg_texts(plot.svg)


def test_the_better_side_is_explained() -> None:
    found = explain_better([ONE, replace(ONE, metric="mean_score", better_side=0), replace(ONE, metric="toxic_rate")])
    assert found[0].startswith("Less counts as better for avg_max and toxic_rate")
    assert found[1].startswith("Which side is better is not known for mean_score")
    assert len(found) == 2


# --- finding ---


@pytest.mark.parametrize(
    ("scores", "side"),
    [((0.3, 0.4), -1), ((0.6, 0.7), 1), ((0.3, 0.6), 0), ((0.3, 0.505), -1), ((0.495, 0.505), 0)],
)
def test_the_better_side_is_where_all_guides_go(scores: tuple[float, float], side: int) -> None:
    guided = [make_cell(score, guide=guide) for guide, score in zip(("rad-q", "gedi"), scores, strict=True)]
    assert find_better_side([UNGUIDED, *guided], "avg_max") == side
    assert find_better_side(guided, "avg_max") == 0  # without unguided texts nobody knows
    assert find_better_side([UNGUIDED, *guided], "toxic_rate") == 0


def test_the_interval_of_the_change_decides_where_there_is_one() -> None:
    change = {"avg_max": Estimate(-0.01, -0.015, -0.005)}
    assert find_better_side([UNGUIDED, make_cell(0.49)], "avg_max") == 0
    assert find_better_side([UNGUIDED, make_cell(0.49, changes=change)], "avg_max") == -1


def test_ours_is_the_first_guide_and_pairs_are_turned() -> None:
    pair = replace(ONE, ours="gedi", other="rad-q", difference=Estimate(0.02, 0.01, 0.04), better_side=0)
    between = replace(pair, other="mlp", difference=Estimate(0.1, 0.09, 0.2))
    cells = [UNGUIDED, make_cell(0.3), make_cell(0.35, guide="gedi"), make_cell(0.3, guide="mlp")]
    run = Run("run", Path("run"), None, cells, [pair, between])
    (one,) = compare_with_others(run)
    assert (one.ours, one.other, one.difference) == ("rad-q", "gedi", Estimate(-0.02, -0.04, -0.01))
    assert one.word == "better than"
    assert find_missing(run) == ["rad-q and mlp"]
    empty = Run("run", Path("run"), None, [UNGUIDED], [])
    assert compare_with_others(empty) == find_missing(empty) == []


def test_candidates_of_a_run_are_compared_apart(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"rad-q": 1.0, "rad-v": 1.3}, groups=("all",), top_ks=(20, 40))
    rows = lines_of(folder / "differences.jsonl")
    write_lines(folder / "differences.jsonl", [row | {"top_k": k} for row in rows for k in (20, 40)])
    (run,) = read_runs([folder])
    compared = compare_with_others(run)
    assert [(one.metric, one.place) for one in compared] == [
        *(("avg_max", f"all, k={k}") for k in (20, 40)),
        *(("positive_rate", f"all, k={k}") for k in (20, 40)),
    ]
    assert {one.better_side for one in compared if one.metric == "avg_max"} == {-1}
    assert len(describe_comparisons(compared)) == 2


def test_differences_name_their_axis_but_those_of_older_runs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"rad-q": 1.0, "rad-v": 1.3}, groups=("all",))
    rows = lines_of(folder / "differences.jsonl")
    newer = [{key: value for key, value in row.items() if key != "perplexity"} for row in rows]
    newer = [row | {"axis": "kl", "range": [0.1, 0.4]} for row in newer]
    write_lines(folder / "differences.jsonl", [*newer, *rows])
    (run,) = read_runs([folder])
    found = [(one.metric, one.axis, one.range) for one in compare_with_others(run)]
    assert found == [
        (metric, *where)
        for metric in ("avg_max", "positive_rate")
        for where in (("perplexity", (11.2, 24.0)), ("kl", (0.1, 0.4)))
    ]
    write_lines(folder / "differences.jsonl", [rows[0] | {"axis": "dist_2"}])
    with pytest.raises(DataError, match="axis must be one of perplexity, kl"):
        read_runs([folder])
