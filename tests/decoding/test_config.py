"""The defaults of decoding, which are the same wherever guides steer."""

import inspect
from pathlib import Path

import pytest
import yaml

from radq.benchmark.config import BenchConfig
from radq.commands.calibrate import Arguments
from radq.decoding.config import DEFAULT_KL_BUDGET, Steering
from radq.decoding.generate import generate
from radq.evaluation.calibration import CalibrationPlan
from radq.evaluation.choices import find_answers
from radq.evaluation.sweep.config import PromptFile, Sweep, load_sweep
from radq.hosts.transformers import GuidedLogitsProcessor
from radq.registry.config import Defaults, ServeConfig

RECIPES = Path(__file__).parents[2] / "recipes"


def test_all_doors_have_one_kl_budget() -> None:
    assert {Steering().kl_budget, Defaults().kl_budget, BenchConfig().kl_budget} == {DEFAULT_KL_BUDGET}
    assert Sweep("base", [PromptFile("p")]).kl_budget == [DEFAULT_KL_BUDGET]
    for door in (generate, GuidedLogitsProcessor, CalibrationPlan, find_answers, Arguments):
        assert inspect.signature(door).parameters["kl_budget"].default == DEFAULT_KL_BUDGET, door


@pytest.mark.parametrize("nothing", ["none", "null"])
def test_yaml_turns_the_budget_off(nothing: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(f"{{base: b, prompts: [{{file: p}}], kl_budget: {nothing}}}")
    assert load_sweep(tmp_path / "sweep.yaml").kl_budget == [None]
    (tmp_path / "serve.yaml").write_text(f"{{defaults: {{kl_budget: {nothing}}}}}")
    assert ServeConfig.read(tmp_path / "serve.yaml").defaults.kl_budget is None


@pytest.mark.parametrize("file", sorted(RECIPES.glob("**/*sweep*/*.yaml")), ids=str)
def test_recipes_that_were_measured_without_a_budget_say_so(file: Path) -> None:
    sweep = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert "kl_budget" in sweep or file.name == "embedded.yaml" or "measured" in file.parts
