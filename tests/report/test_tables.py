"""Tables: by hand, and any result in any format."""

import csv
import re
from math import isnan

from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folders import (
    NAMES,
    Page,
    make_result,
)

from radq.evaluation.estimates import Estimate
from radq.report.results import NAN, Result
from radq.report.tables import (
    left_out_table,
    number,
    result_table,
    to_csv,
    to_latex,
    to_markdown,
)

NUMBERS = st.floats() | st.just(NAN)
RESULTS = st.lists(
    st.builds(
        make_result,
        guide=NAMES,
        beta=st.none() | st.floats(-1e6, 1e6),
        metrics=st.dictionaries(
            st.sampled_from(["avg_max", "perplexity", "toxic_rate[a|b]", "mauve"]),
            st.builds(Estimate, NUMBERS, NUMBERS, NUMBERS, st.integers(0, 9), st.integers(0, 9)),
        ),
        cost=st.dictionaries(st.sampled_from(["tokens_per_second", "peak_memory"]), NUMBERS),
    ),
    min_size=1,
    max_size=5,
)


@given(RESULTS)
@settings(max_examples=60, deadline=None)
def test_tables_hold_any_result(results: list[Result]) -> None:
    from markdown_it import MarkdownIt

    table = result_table(results, "a title")
    rows = list(csv.DictReader(to_csv(results).splitlines()))
    for row, result in zip(rows, results, strict=True):
        assert row["guide"] == result.guide
        for key, one in result.metrics.items():
            assert row[key] == "" if isnan(one.value) else float(row[key]) == one.value
    texts = [[f"{entry.text} {entry.interval}".strip() for entry in line] for line in table.rows]
    rendered = Page(MarkdownIt("commonmark").enable("table").render(to_markdown(table)))
    assert rendered.cells == [table.header, *texts]
    lines = to_latex(table).splitlines()
    assert lines[-1] == r"\end{tabular}"
    for line in [lines[3], *lines[5:-2]]:
        assert len(re.findall(r"(?<!\\)&", line)) == len(table.header) - 1
        assert line.endswith(r" \\")


def test_a_table_by_hand() -> None:
    metrics = {"perplexity": Estimate(12.3456, 11.0, float("inf")), "avg_max": Estimate(0.25, NAN, NAN, 3)}
    cost = {"tokens_per_second": 12345.6, "peak_memory": 2.0**30}
    results = [make_result(guide="a_b|c", metrics=metrics, cost=cost), make_result(guide="[x]", beta=None)]
    table = result_table(results, "50% prompts")
    assert to_markdown(table) == (
        "### 50% prompts\n\n"
        "| guide | β | k | seed | avg\\_max | perplexity | tokens/s | peak GiB |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| a\\_b\\|c | 10 | 20 | 0 | 0.250 | 12.35 [11.00, ∞] | 1.235e+04 | 1.000 |\n"
        "| \\[x\\] | – | 20 | 0 | – | – | – | – |\n"
    )
    assert to_latex(table) == (
        "% 50% prompts\n"
        "\\begin{tabular}{lrrrrrrr}\n\\toprule\n"
        "guide & $\\beta$ & k & seed & avg\\_max & perplexity & tokens/s & peak GiB \\\\\n\\midrule\n"
        "{}a\\_b\\textbar{}c & 10 & 20 & 0 & 0.250 & 12.35 {\\scriptsize [11.00, $\\infty$]} & 1.235e+04 & 1.000 \\\\\n"
        "{}[x] & -- & 20 & 0 & -- & -- & -- & -- \\\\\n"
        "\\bottomrule\n\\end{tabular}\n"
    )


def test_numbers() -> None:
    values = [0.12345, -0.0071, 12.345, 1234.5, NAN, float("-inf")]
    assert [number(value) for value in values] == ["0.123", "−0.007", "12.35", "1234", "–", "−∞"]
    assert number(0.5, "+") == "+0.500"


def test_what_is_left_out_is_counted() -> None:
    results = [
        make_result(metrics={"avg_max": Estimate(0.1, 0, 1, 2), "mauve": Estimate(NAN, NAN, NAN)}),
        make_result(metrics={"avg_max": Estimate(0.1, 0, 1, 3), "perplexity": Estimate(9, 8, 10, 0, 7)}),
        make_result(guide="rad-v", metrics={"avg_max": Estimate(0.1, 0, 1)}),
    ]
    assert [[entry.text for entry in row] for row in left_out_table(results).rows] == [
        ["rad-q", "all", "avg_max", "5", "0", "0"],
        ["rad-q", "all", "mauve", "0", "0", "1"],
        ["rad-q", "all", "perplexity", "0", "7", "0"],
    ]
