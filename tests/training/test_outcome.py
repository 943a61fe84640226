"""The outcome of a run in words: figures with their meaning, warnings at chance, and commands that go on."""

import shlex
import warnings
from pathlib import Path

import numpy as np
import pandas
import pytest

from radq.cli import main
from radq.judges.agreement import area_under_curve, chance_auc, chance_correlation, rank_correlation
from radq.toy import make_reviews
from radq.training.config import RewardTrainingConfig
from radq.training.outcome import describe_outcome, next_commands, warn_of_chance
from radq.training.run import format_duration

GOOD = {"eval_loss": 0.1, "eval_auc_praise": 0.86, "eval_chance_auc_praise": 0.6}
ERRORS = {"eval_weighted_mse": 0.1, "eval_constant_weighted_mse": 0.25}


def test_figures_come_with_their_meaning() -> None:
    auc, error = describe_outcome(GOOD | ERRORS, ["praise"])
    assert auc.startswith("praise: AUC 0.86: ranks a random high text above a random low one 86% of the time")
    assert error == "mean squared distance to the labels: 0.1000; that of a constant is 0.2500"
    (correlation,) = describe_outcome({"eval_loss": 0.1, "eval_spearman_praise": 0.5}, ["praise"])
    assert "rank correlation 0.50" in correlation
    agreement = {"eval_candidate_correlation": 0.8, "eval_candidate_error": 0.2, "eval_constant_candidate_error": 0.3}
    (candidates,) = describe_outcome({"eval_loss": 0.1} | agreement, ["praise"])
    assert "correlation 0.80" in candidates
    assert "error 0.2000; that of equal rewards is 0.3000" in candidates
    (pairs,) = describe_outcome({"eval_loss": 0.1, "eval_pair_accuracy": 0.82}, ["praise"])
    assert "pair accuracy 0.82: the preferred text has the larger reward in 82% of the held-out pairs" in pairs
    (nothing,) = describe_outcome({"train_loss": 0.1}, ["praise"])
    assert "no texts were held out" in nothing


def test_chance_is_said_in_words() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_chance(GOOD | ERRORS, ["praise"])
        warn_of_chance({"train_loss": 0.1}, ["praise"])
    with pytest.warns(UserWarning, match="AUC of 'praise' is 0.55, which is no better than chance.*hint: "):
        warn_of_chance(GOOD | {"eval_auc_praise": 0.55}, ["praise"])
    with pytest.warns(
        UserWarning, match="differences between candidates .* an error of 0.3, and equal rewards one of 0.3"
    ):
        warn_of_chance({"eval_candidate_error": 0.3, "eval_constant_candidate_error": 0.3}, [])
    with pytest.warns(UserWarning, match="pair accuracy is 0.52, which is no better than chance"):
        warn_of_chance({"eval_pair_accuracy": 0.52, "eval_chance_pair_accuracy": 0.55}, [])
    with pytest.warns(UserWarning, match="pair accuracy is 0.46, which is no better than chance"):  # of few pairs
        warn_of_chance({"eval_pair_accuracy": 0.46, "eval_chance_pair_accuracy": 0.55}, [])
    with pytest.warns(UserWarning, match="in 40% of the pairs.*chosen and rejected may be swapped"):
        warn_of_chance({"eval_pair_accuracy": 0.4, "eval_chance_pair_accuracy": 0.55}, [])
    with pytest.warns(UserWarning, match="does not beat a constant: .* the teacher's rewards is 0.2"):
        warn_of_chance({"eval_distillation_mse": 0.2, "eval_constant_distillation_mse": 0.2}, [])


@pytest.mark.slow
@pytest.mark.parametrize(("num_high", "num_low"), [(30, 30), (20, 80)])
def test_random_answers_exceed_the_limits_of_chance_in_one_of_twenty_cases(num_high: int, num_low: int) -> None:
    rng = np.random.default_rng(0)
    high = np.arange(num_high + num_low) < num_high
    drawn = [rng.normal(size=len(high)) for _ in range(4000)]
    exceeded = [area_under_curve(scores, high) > chance_auc(num_high, num_low) for scores in drawn]
    assert 0.04 < np.mean(exceeded) < 0.06
    labels = np.arange(len(high), dtype=float)
    exceeded = [(rank_correlation(scores, labels) or 0) > chance_correlation(len(high)) for scores in drawn]
    assert 0.04 < np.mean(exceeded) < 0.06


def test_the_next_commands_are_those_that_people_can_type(
    calm_toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "my reviews.csv", tmp_path / "run"
    pandas.DataFrame(make_reviews(60), columns=["words", "praise"]).to_csv(data, index=False)
    common = ["--text", "words", "--num-layers", "1", "--max-steps", "2", "--cache", str(tmp_path / "cache")]
    names = ["--data", str(data), "--labels", "praise", "--backbone", str(calm_toy), "--out", str(out)]
    assert main(["train", *names, "--kind", "v", *common]) == 0
    printed = capsys.readouterr().out
    assert "rank correlation" in printed
    assert "54 to train on and 6 held out" in printed
    commands = [shlex.split(line) for line in printed.partition("next:\n")[2].splitlines()]
    assert [command[1] for command in commands] == ["score", "generate", "distill"]
    for _, *argv in commands:
        assert main(argv) == 0, argv
    assert f"--base {calm_toy}" in capsys.readouterr().out  # the student's base, from the run of its teacher


def test_a_base_that_nobody_knows_is_left_open(tmp_path: Path) -> None:
    settings = RewardTrainingConfig(data=["a.csv"], init=str(tmp_path / "gone"), out="b")
    assert "--base BASE" in next_commands(settings, ["praise"])[1]


def test_durations_are_words() -> None:
    words = {0.2: "1 s", 59.6: "1 min 0 s", 160: "2 min 40 s", 7300: "2 h 1 min"}
    assert {seconds: format_duration(seconds) for seconds in words} == words
