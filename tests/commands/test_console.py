"""Tables for people are never cut, and JSON is JSON."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radq.commands.console import print_json, print_metrics, print_table

WORDS = st.text(st.sampled_from("abcdefgh0123456789.[]"), min_size=1, max_size=40)


@given(st.lists(st.lists(WORDS, min_size=6, max_size=6), min_size=1, max_size=4), st.integers(1, 200))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_without_a_terminal_every_entry_is_on_its_line(
    capsys: pytest.CaptureFixture[str], rows: list[list[str]], columns: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        print_table(rows[0], rows, words=2)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1::2] for line in printed if line[0] == "│"] == rows


def test_in_a_narrow_terminal_names_wrap_and_numbers_do_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"COLUMNS": "40", "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    names = ["avg_max[a judge]", "perplexity", "dist_2"]
    metrics = {name: {"value": 1234.5 + number} for number, name in enumerate(names)}
    print_metrics([{"cell": "a guide with a long name β=10", "group": "neutral", "prompts": 5, "metrics": metrics}])
    out = capsys.readouterr().out
    assert "…" not in out
    assert all(number in out for number in ("1234", "1236"))
    words = "a guide with a long name β=10 5 neutral prompts avg_max perplexity dist_2".split()
    assert all(word in out for word in words)


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [math.nan, (1.5, -math.inf)], "b": {"c": math.inf, "d": "NaN", "e": None, "f": True}})
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document == {"a": [None, [1.5, None]], "b": {"c": None, "d": "NaN", "e": None, "f": True}}
