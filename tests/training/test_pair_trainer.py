"""Training on pairs: preferences are learnt and steer, and neither batches, processes nor kills change a run."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from kills import run_and_kill
from training_runs import SMALL, changed, lines, losses, run_in_two_processes, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import radq
from radq.cli import main
from radq.data.dataset import GlobalBatches
from radq.data.pairs import ResponseColumns, load_pairs
from radq.errors import DataError, OptionError
from radq.judges.agreement import chance_accuracy
from radq.models.kinds import RadQ
from radq.models.reward import RewardModel
from radq.toy import BAD, GOOD, make_reviews
from radq.training.config import RewardTrainingConfig
from radq.training.losses import baseline_loss, pair_metrics, preference_loss
from radq.training.reward import train
from radq.training.reward_trainer import random_tokens

COLUMNS = ResponseColumns(["chosen", "rejected"])


LEARNING: dict[str, Any] = {"learning_rate": 3e-3, "epochs": 5, "batch_size": 8, "reg_weight": 0.1}


def make_texts(number: int) -> list[tuple[str, str, str]]:
    """So many reviews that praise, that do both, and that blame."""
    reviews = make_reviews(8 * number)
    kinds = ([text for text, praise in reviews if praise == wanted] for wanted in (1.0, 0.5, 0.0))
    return list(zip(*kinds, strict=False))[:number]


def make_pairs(number: int) -> list[dict[str, str]]:
    return [{"chosen": better, "rejected": worse} for better, _, worse in make_texts(number)]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "pairs.csv"
    pandas.DataFrame(make_pairs(100)).to_csv(file, index=False)
    return file


@pytest.fixture
def settings(pairs: Path, calm_toy: Path, tmp_path: Path) -> RewardTrainingConfig:
    return RewardTrainingConfig(
        recipe="paper",
        data=[str(pairs)],
        pairs="chosen,rejected",
        backbone=str(calm_toy),
        out=str(tmp_path / "run"),
        cache=str(tmp_path / "cache"),
        **SMALL,
    )


# --- what is learnt ---


def share_of_good_words(model: RewardModel, toy: Path, beta: float) -> float:
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(toy), AutoTokenizer.from_pretrained(toy)
    guide = radq.RewardGuide(model, {"praise": beta})
    prompts = ["the film was", "this plot seemed"]
    found = radq.generate(lm, tokenizer, prompts, guide, max_new_tokens=5, samples=20, seed=0)
    words = [word for generation in found for word in generation.text.split()]
    good, bad = (sum(word in known for word in words) for known in (GOOD, BAD))
    return good / (good + bad)


@pytest.mark.parametrize("kind", ["q", pytest.param("v", marks=pytest.mark.slow)])
def test_preferences_are_learnt_and_steer(kind: str, settings: RewardTrainingConfig, tmp_path: Path) -> None:
    pandas.DataFrame(make_pairs(240)).to_csv(tmp_path / "pairs.csv", index=False)
    settings = changed(settings, data=[str(tmp_path / "pairs.csv")], labels="praise", eval_share=0.2, **LEARNING)
    metrics = train(changed(settings, kind=kind))
    assert metrics["eval_pair_accuracy"] > 0.9
    assert metrics["eval_loss"] < 0.55 < metrics["eval_constant_loss"] == pytest.approx(math.log(2))
    model = RewardModel.from_pretrained(settings.out)
    assert model.config.attributes == ["praise"]
    low, high = model.config.attribute_ranges[0]
    assert low < high
    beta = 60 / (high - low)
    assert share_of_good_words(model, Path(settings.backbone), beta) > 0.7
    assert share_of_good_words(model, Path(settings.backbone), -beta) < 0.3


@pytest.mark.slow
def test_a_readout_learns_preferences(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    pandas.DataFrame(make_pairs(240)).to_csv(tmp_path / "pairs.csv", index=False)
    settings = changed(settings, data=[str(tmp_path / "pairs.csv")], reads="base", eval_share=0.2, **LEARNING)
    metrics = train(settings)
    assert metrics["eval_pair_accuracy"] > metrics["eval_chance_pair_accuracy"]
    assert metrics["eval_loss"] < 0.6
    low, high = RewardModel.from_pretrained(settings.out).config.attribute_ranges[0]
    assert low < high


def test_lists_of_responses_are_learnt(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    rows = [{"answers": list(texts), "grades": [3, 1, -2]} for texts in make_texts(100)]
    (tmp_path / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lists = {"data": [str(tmp_path / "lists.jsonl")], "pairs": "", "responses": "answers", "scores": "grades"}
    metrics = train(changed(settings, eval_share=0.2, max_pairs=2, **lists, **LEARNING))
    assert metrics["eval_pair_accuracy"] > 0.75
    assert RewardModel.from_pretrained(settings.out).config.attributes == ["preference"]


# --- what must not matter ---


def test_the_logged_loss_is_the_loss_of_the_batch(settings: RewardTrainingConfig) -> None:
    train(changed(settings, learning_rate=1e-12))
    torch.manual_seed(settings.seed)
    model = RadQ.from_backbone(settings.backbone, ["preference"])
    assert model.tokenizer is not None
    data = load_pairs(settings.data, model.tokenizer, COLUMNS, cache_folder=settings.cache)
    expected = []
    for indices in GlobalBatches(data.lengths, 16):
        batch = data.batch(indices)
        tokens = random_tokens(batch, model.vocabulary.size, 0, 0)
        with torch.no_grad():
            output = model(batch["input_ids"], batch["attention_mask"], tokens)
        loss = preference_loss(output.rewards, batch["loss_mask"])
        expected.append((loss + baseline_loss(output.marginals, batch["loss_mask"])).item())
    assert losses(settings.out) == pytest.approx(expected, abs=1e-5)


def test_accumulation_does_not_change_the_losses(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    settings = changed(settings, batch_size=24)  # and a last batch of 4
    train(settings)
    cut = changed(settings, micro_batch_size=5, out=str(tmp_path / "cut"))
    train(cut)
    assert losses(cut.out) == pytest.approx(losses(settings.out), abs=1e-5)


def arguments(settings: RewardTrainingConfig, **more: Any) -> list[str]:
    names = ("pairs", "backbone", "out", "cache", "epochs", "batch_size", "log_steps", "learning_rate", "recipe")
    values = {name: getattr(settings, name) for name in names} | {"data": settings.data[0], **more}
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # of torch's reducer
@pytest.mark.filterwarnings("ignore:on the held-out texts")
def test_two_processes_have_the_losses_and_metrics_of_one(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    train(changed(settings, eval_share=0.13))
    two = changed(settings, out=str(tmp_path / "two"))
    command = ["train", *arguments(two, eval_share=0.13), "--json"]
    assert run_in_two_processes(lambda: main(command)) == [0, 0]
    assert losses(two.out) == pytest.approx(losses(settings.out), abs=1e-5)
    one, other = ([line for line in lines(run) if "eval_loss" in line][-1] for run in (settings.out, two.out))
    for name in ("eval_pair_accuracy", "eval_pair_margin"):
        assert one[name] == pytest.approx(other[name], abs=1e-4)
    ranges = [RewardModel.from_pretrained(run).config.response_range for run in (settings.out, two.out)]
    assert ranges[0] == pytest.approx(ranges[1], abs=1e-4)


def test_a_killed_run_resumes_to_the_same_weights(settings: RewardTrainingConfig, toy: Path, tmp_path: Path) -> None:
    settings = changed(settings, backbone=str(toy), epochs=2)  # with dropout
    command = ["train", "--save-steps", "4", "--json"]
    whole = changed(settings, out=str(tmp_path / "whole"))
    assert main([*command, *arguments(whole)]) == 0
    run_and_kill("radq.training.reward_trainer:BatchTrainer._save_checkpoint", 2, [*command, *arguments(settings)])
    assert main(["train", "--resume", "--out", settings.out, "--json"]) == 0
    assert losses(settings.out) == losses(whole.out)
    for name, values in weights(whole.out).items():
        assert torch.equal(weights(settings.out)[name], values), name
    ranges = [RewardModel.from_pretrained(run).config.response_range for run in (settings.out, whole.out)]
    assert ranges[0] == ranges[1]


# --- metrics and the range ---


def test_metrics_by_hand() -> None:
    found = pair_metrics(np.array([[1.0, 0.0], [2.0, 2.0], [0.0, 3.0], [5.0, 1.0]]))
    assert found["pair_accuracy"] == (1 + 0.5 + 0 + 1) / 4
    assert found["pair_margin"] == (1 + 0 - 3 + 4) / 4
    assert found["chance_pair_accuracy"] == pytest.approx(0.5 + 1.645 / 4)


def test_random_rewards_exceed_chance_in_one_of_twenty_cases() -> None:
    accuracies = np.random.default_rng(0).normal(size=(4000, 1001)) > 0
    assert 0.04 < (accuracies.mean(1) > chance_accuracy(1001)).mean() < 0.06


def test_the_range_holds_98_of_100_rewards_of_whole_texts(settings: RewardTrainingConfig) -> None:
    train(settings)
    model = RewardModel.from_pretrained(settings.out)
    assert model.tokenizer is not None
    rewards = []
    for row in pandas.read_csv(settings.data[0]).to_dict("records"):
        for text in row.values():
            with torch.no_grad():
                rewards.append(
                    model.token_rewards(model.tokenizer(text, return_tensors="pt").input_ids)[0, -1, 0].item()
                )
    assert model.config.response_range == pytest.approx(np.quantile(rewards, [0.01, 0.99]).tolist(), abs=1e-5)
    assert model.config.label_scales is None


def test_swapped_columns_are_warned_of(settings: RewardTrainingConfig, pairs: Path, tmp_path: Path) -> None:
    swapped = pandas.read_csv(pairs).rename(columns={"chosen": "rejected", "rejected": "chosen"})
    swapped.to_csv(tmp_path / "swapped.csv", index=False)
    with pytest.warns(UserWarning, match="less than one half: chosen and rejected may be swapped"):
        metrics = train(changed(settings, eval_data=[str(tmp_path / "swapped.csv")], **LEARNING))
    assert metrics["eval_pair_accuracy"] < 0.2


def test_the_best_evaluation_is_the_most_accurate(settings: RewardTrainingConfig) -> None:
    learning = {"learning_rate": 3e-3, "epochs": 4, "eval_steps": 3}
    metrics = train(changed(settings, metric="pair_accuracy", eval_share=0.3, **learning))
    found = [line["eval_pair_accuracy"] for line in lines(settings.out) if "eval_pair_accuracy" in line]
    assert metrics["eval_pair_accuracy"] == max(found)


def test_a_second_stage_on_pairs_forgets_the_scale_of_labels(
    settings: RewardTrainingConfig, reviews: Path, tmp_path: Path
) -> None:
    first = changed(settings, data=[str(reviews)], pairs="", labels="praise", loss="ce", out=str(tmp_path / "first"))
    train(first)
    train(changed(settings, labels="praise", backbone="", init=first.out))
    config = RewardModel.from_pretrained(settings.out).config
    assert (config.label_scales, config.loss) == (None, "mse")  # rewards are the outputs of the head
    assert config.response_range != [0.0, 1.0]


# --- mistakes ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": "chosen"}, "pairs must name two columns, got 'chosen'"),
        ({"pairs": "chosen,chosen"}, "pairs must name two columns"),
        ({"pairs": "a,b,c"}, "pairs must name two columns"),
        ({"labels": "a,b"}, "labels must name one attribute"),
        ({"responses": "answers", "scores": "grades"}, "both pairs and responses are given"),
        ({"responses": "answers"}, "responses needs scores"),
        ({"scores": "grades"}, "scores needs responses"),
        ({"loss": "ce"}, "loss and pairs exclude each other"),
        ({"label_map": "a=1"}, "label_map and pairs exclude each other"),
        ({"keep_labels": True}, "keep_labels and pairs exclude each other"),
        ({"teacher": "v"}, "teacher and pairs exclude each other"),
    ],
)
def test_settings_that_contradict_pairs_are_refused(
    change: dict[str, Any], message: str, settings: RewardTrainingConfig
) -> None:
    with pytest.raises(OptionError, match=message):
        changed(settings, **change).check()


def test_equal_pairs_end_with_one_line(settings: RewardTrainingConfig, tmp_path: Path, capsys: Any) -> None:
    rows = [*make_pairs(40), {"chosen": "the film .", "rejected": "the film ."}]
    pandas.DataFrame(rows).to_csv(tmp_path / "pairs.csv", index=False)
    command = ["train", *arguments(settings, data=tmp_path / "pairs.csv")]
    assert main(command) == 2
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert "row 41: two responses with different scores are equal, 'the film .'" in last
    assert main([*command, "--skip-empty"]) == 0
    printed = capsys.readouterr().out
    assert "40 pairs of 80 texts" in printed
    assert "1 rows with empty or equal texts left out" in printed
    assert "no texts were held out" in printed


def test_texts_of_another_file_need_the_same_columns(settings: RewardTrainingConfig, reviews: Path) -> None:
    with pytest.raises(DataError, match="has no column 'chosen'"):
        train(changed(settings, eval_data=[str(reviews)]))


def test_the_next_commands_are_those_that_people_can_type(
    settings: RewardTrainingConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments(settings, kind="v", max_steps=2)]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.partition("next:\n")[2].splitlines()]
    assert [command[1] for command in commands] == ["score", "generate", "distill"]
    for _, *argv in commands:
        assert main(argv) == 0, argv
