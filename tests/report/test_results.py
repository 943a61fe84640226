"""Run folders are read, errors in them are named with their place, and cells are ordered into curves."""

import json
import re
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_folders import interval, lines_of, make_run, write_lines

from radq.errors import DataError
from radq.evaluation.sweep.folder import array_file, read_arrays, write_arrays
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


def test_samples_have_the_scores_of_their_cell_and_prompt(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"rad-q": 1.0}, groups=("all",))
    cells = [row["cell"] for row in lines_of(folder / "metrics.jsonl")]
    for number, cell in enumerate(cells[:2]):
        scores = 100 * number + np.arange(12 * 6).reshape(12, 6)
        scores = np.where(scores == 3, np.nan, scores).astype(float)
        write_arrays(folder, cell, {"scores[mood]": scores, "nll": scores, "tokens": scores})
    array_file(folder, cells[2]).write_bytes(b"no archive")
    (run,) = read_runs([folder])
    samples = read_samples([run], prompts=2, continuations=4)
    for number, prompt in enumerate(samples):
        found = [[sample.scores for sample in prompt.continuations["run", cell]] for cell in cells]
        first = 6 * number
        blank = {} if number == 0 else {"mood": 9.0}
        assert found[0] == [{"mood": float(first + n)} for n in range(3)] + [blank]
        assert found[1] == [{"mood": float(100 + first + n)} for n in range(4)]
        assert found[2] == found[3] == [{}] * 4
    assert len(cells) == 5
    assert len([note for note in run.notes if "no scores" in note]) == 3  # one file is damaged, and two are missing


@pytest.mark.parametrize("cell", ["../outside", "a/../../outside"])
def test_scores_come_from_the_run_folder_alone(cell: str, tmp_path: Path) -> None:
    (tmp_path / "measures" / "a").mkdir(parents=True)
    np.savez(tmp_path / "outside.npz", a=np.zeros(1))
    with pytest.raises(DataError, match="not in the run folder"):
        read_arrays(tmp_path, cell)


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
        ({"metrics": {"avg_max": 3}}, "avg_max must be an object with value, low and high, got 3"),
        ({"metrics": {"avg_max": {"value": "high"}}}, "value must be a number or null, got 'high'"),
        ({"metrics": {"fun": None}}, "there is no metric 'fun'. hint: choose from avg_max, toxic_rate"),
        ({"metrics": {"fun[judge]": None}}, "there is no metric 'fun'"),
        ({"metrics": None}, "metrics must be an object, got None"),
        ({"guide": None}, "guide must be a text, got None"),
        ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"seed": float("inf")}, "seed must be a whole number, got inf"),
        ({"beta": "10"}, "beta must be a number or null, got '10'"),
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
