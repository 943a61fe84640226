"""Run folders: read as they are, with a place for all that is wrong in them."""

import json
import re
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folders import interval, lines_of, make_run, write_lines

from radq.errors import DataError
from radq.report.results import printable, read_runs, read_samples


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "detox", seeds=(0, 1))


def test_reading(run: Path) -> None:
    (read,) = read_runs([run])
    rows = lines_of(run / "metrics.jsonl")
    assert [result.cell for result in read.results] == [printable(row["cell"]) for row in rows]
    assert read.results[0].unguided
    assert read.results[0].metrics["avg_max"].value == rows[0]["metrics"]["avg_max"]["value"]
    assert isnan(next(result for result in read.results if result.group == "neutral").metrics["mauve"].value)
    assert read.notes == []


def test_samples_are_the_first_prompts_of_each_class(run: Path) -> None:
    (read,) = read_runs([run])
    samples = read_samples([read], prompts=2, continuations=3)
    assert [(sample.group, sample.prompt[:24]) for sample in samples] == [
        ("neutral", "The weather on day 0 was"),
        ("neutral", "The weather on day 2 was"),
        ("negative", "prompt 1 <script>alert(1"),
        ("negative", "The weather on day 3 was"),
    ]
    cells = {("detox", result.cell) for result in read.results}
    assert all(set(sample.continuations) == cells for sample in samples)
    assert all(len(texts) == 3 for sample in samples for texts in sample.continuations.values())


def test_the_later_of_two_lines_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", groups=("all",))
    row = lines_of(folder / "metrics.jsonl")[0]
    row["metrics"] = {"avg_max": interval(0.123, 0.01)}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    (read,) = read_runs([folder])
    assert read.results[0].metrics["avg_max"].value == 0.123
    assert "is there twice" in read.notes[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metrics": {"avg_max": 3}}, "avg_max is 3"),
        ({"metrics": {"avg_max": {"value": "high"}}}, "value is 'high'"),
        ({"metrics": {"fun": None}}, "there is no metric 'fun'. hint: those there are: avg_max, toxic_rate"),
        ({"metrics": {"fun[judge]": None}}, "there is no metric 'fun'"),
        ({"metrics": None}, "an object is wanted"),
        ({"guide": None}, "guide is None"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"seed": float("inf")}, "seed is inf"),
        ({"beta": "10"}, "beta is '10'"),
    ],
)
def test_odd_rows(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", groups=("all",))
    rows = lines_of(folder / "metrics.jsonl")
    rows[2] |= change
    write_lines(folder / "metrics.jsonl", rows)
    with pytest.raises(DataError, match=re.escape("metrics.jsonl, line 3:")) as error:
        read_runs([folder])
    assert words in str(error.value)


@given(st.binary(max_size=60).filter(lambda line: b"\n" not in line and b"\r" not in line and line.strip()))
@settings(max_examples=60, deadline=None)
def test_damage_is_named(tmp_path_factory: pytest.TempPathFactory, line: bytes) -> None:
    folder = tmp_path_factory.mktemp("damage")
    (folder / "metrics.jsonl").write_bytes(b"\n" + line + b"\n")
    with pytest.raises(DataError, match="metrics.jsonl, line 2"):
        read_runs([folder])
