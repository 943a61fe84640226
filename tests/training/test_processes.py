"""Several processes of a run on CPUs: one writes what all read, and all stop alike."""

import os
from pathlib import Path
from typing import Any

import pytest
from training_runs import SMALL, changed, losses, make_settings, run_in_two_processes, write_reviews

from radq.cli import main
from radq.data import tokens
from radq.errors import DataError, OptionError
from radq.guides.folders import ANTI_EXPERT, EXPERT
from radq.training.config import ExpertTrainingConfig, RewardTrainingConfig
from radq.training.experts import train_experts
from radq.training.reward import train

pytestmark = pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # of torch's reducer


@pytest.fixture
def settings(calm_toy: Path, tmp_path: Path) -> RewardTrainingConfig:
    return make_settings(tmp_path, 64, calm_toy, labels="praise", **SMALL)


def test_only_the_first_process_tokenises(
    settings: RewardTrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenise, calls = tokens._tokenise, tmp_path / "calls"

    def noted(*arguments: Any) -> None:
        with calls.open("a") as stream:
            stream.write(f"{os.environ['RANK']}\n")
        tokenise(*arguments)

    monkeypatch.setattr(tokens, "_tokenise", noted)
    assert run_in_two_processes(lambda: train(settings)) == [0, 0]
    assert {*calls.read_text().split()} == {"0"}


def test_the_error_of_the_first_process_is_that_of_all(
    settings: RewardTrainingConfig, calm_toy: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(settings.data[0]).write_text("text,praise\n")
    with pytest.raises(DataError, match="there are no rows") as alone:
        train(settings)
    command = ["train", "--data", settings.data[0], "--labels", "praise", "--backbone", str(calm_toy)]
    assert run_in_two_processes(lambda: main([*command, "--out", settings.out, "--json"])) == [2, 2]
    said, line = capfd.readouterr().err, f"error: {alone.value}"
    assert said.count(line) == 2
    assert not said.replace(line, "").strip()


@pytest.mark.parametrize("wait", ["long", 0, 1.5, None])
def test_a_wait_that_is_no_number_of_seconds_is_refused(wait: Any, settings: RewardTrainingConfig) -> None:
    with pytest.raises(OptionError, match=r"ddp_timeout must be a whole number of seconds, got .*under `trainer:`"):
        train(changed(settings, trainer={"ddp_timeout": wait}))


@pytest.mark.parametrize("method", ["dexperts", "gedi"])
def test_language_models_of_two_processes_have_the_losses_of_one(method: str, calm_toy: Path, tmp_path: Path) -> None:
    data = [str(write_reviews(tmp_path / "reviews.csv", 64))]
    codes = {"code_high": "good", "code_low": "bad"} if method == "gedi" else {}
    one = ExpertTrainingConfig(
        data=data,
        labels="praise",
        method=method,
        backbone=str(calm_toy),
        out=str(tmp_path / "one"),
        cache=str(tmp_path / "cache"),
        **codes,
        **SMALL,
    )
    two = changed(one, out=str(tmp_path / "two"))
    train_experts(one)
    assert run_in_two_processes(lambda: train_experts(two)) == [0, 0]
    for folder in [""] if method == "gedi" else [EXPERT, ANTI_EXPERT]:
        found, expected = (losses(Path(run.out) / folder) for run in (two, one))
        assert found == pytest.approx(expected, abs=1e-5)
