"""The files in examples/ are those that their script writes, and the sweep over them can be read."""

import csv
import re
import runpy
from itertools import combinations
from pathlib import Path

import pytest

from radq.data.prompts import read_prompts
from radq.evaluation.estimates import TRUSTED_PROMPTS
from radq.evaluation.sweep.config import load_sweep

REPOSITORY = Path(__file__).parent.parent
EXAMPLES = REPOSITORY / "examples"


def test_the_reviews_are_those_of_the_script(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLES / "make_reviews.py"))["main"](str(tmp_path / "reviews.csv"))
    assert (tmp_path / "reviews.csv").read_bytes() == (EXAMPLES / "reviews.csv").read_bytes()


def test_the_reviews_differ_and_cover_all_labels() -> None:
    with (EXAMPLES / "reviews.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    words = [frozenset(re.findall(r"\w+", row["text"].lower())) for row in rows]
    assert len(set(words)) > 0.99 * len(rows) > 900
    alike = sum(len(one ^ other) <= 2 for one, other in combinations(words, 2))
    assert alike < 0.01 * len(rows)
    labels = [float(row["praise"]) for row in rows]
    assert 0 <= min(labels) < max(labels) <= 1
    for low, high in ((0, 0.3), (0.3, 0.7), (0.7, 1.01)):
        assert sum(low <= label < high for label in labels) > 0.05 * len(rows)
    assert (EXAMPLES / "reviews.csv").stat().st_size < 300_000


def test_the_sweep_reads_its_prompts_from_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    sweep = load_sweep("recipes/sweeps/embedded.yaml")
    prompts = sweep.read_prompts()
    assert prompts == read_prompts(EXAMPLES / "prompts.txt")
    assert len({prompt.text for prompt in prompts}) == len(prompts) >= TRUSTED_PROMPTS
