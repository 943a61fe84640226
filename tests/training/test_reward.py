"""Training: tasks with known answers are learnt, and neither batches, processes nor crashes change a run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from kills import run_and_kill
from training_runs import changed, losses, run_in_two_processes, weights

from radq.cli import main
from radq.errors import DataError, ModelError, OptionError, VocabularyError
from radq.guides.reward import RewardGuide
from radq.models.kinds import RadQ, RadV
from radq.models.reward import RewardModel
from radq.settings import read_yaml
from radq.toy import BAD, GOOD, NOUNS, make_reviews
from radq.training.config import RewardTrainingConfig
from radq.training.losses import baseline_loss, compute_metrics, constant_metrics, squared_loss
from radq.training.reward import train
from radq.training.reward_trainer import random_tokens
from radq.training.run_folder import find_checkpoints

# --- what is learnt ---


def one_word() -> list[tuple[str, float]]:
    return [(text, float("film" in text)) for text, _ in make_reviews(1000)]


def word_order() -> list[tuple[str, float]]:
    """1 if the good word comes before the bad one."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(1000):
        pair = [rng.choice(GOOD), rng.choice(BAD)]
        first = int(rng.integers(2))
        rows.append((f"the {rng.choice(NOUNS)} was {pair[1 - first]} but {pair[first]} .", float(first)))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q", "v"])
@pytest.mark.parametrize("task", ["one word", "several words", "word order"])
def test_known_answers_are_learnt(kind: str, task: str, calm_toy: Path, tmp_path: Path) -> None:
    rows = {"one word": one_word, "several words": lambda: make_reviews(2000), "word order": word_order}[task]()
    pandas.DataFrame(rows, columns=["text", "answer"]).to_csv(tmp_path / "rows.csv", index=False)
    settings = RewardTrainingConfig(
        data=[str(tmp_path / "rows.csv")],
        labels="answer",
        backbone=str(calm_toy),
        out=str(tmp_path / "run"),
        cache=str(tmp_path / "cache"),
        kind=kind,  # pyright: ignore[reportArgumentType]
        learning_rate=3e-3,
        epochs=8,
        batch_size=32,
        eval_share=0.1,
        reg_weight=0.1,
    )
    metrics = train(settings)
    assert metrics["eval_last_token_mse"] < 0.01
    assert ("eval_auc_answer" in metrics) == (task != "several words")

    model = RewardModel.from_pretrained(tmp_path / "run")
    assert model.tokenizer is not None
    ids = model.tokenizer("the plot was", return_tensors="pt").input_ids
    expected = np.mean([answer for text, answer in rows if task == "several words" or "plot was" in text])
    with torch.no_grad():
        assert model.token_rewards(ids)[0, -1, 0].item() == pytest.approx(expected, abs=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:on the evaluation data the model does not beat a constant")
def test_a_student_learns_its_teachers_rewards(settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path) -> None:
    teacher = changed(settings, kind="v", epochs=12, learning_rate=3e-3, out=str(tmp_path / "teacher"))
    train(teacher)
    before = (tmp_path / "teacher" / "model.safetensors").read_bytes()
    student = changed(settings, teacher=str(tmp_path / "teacher"), labels="", learning_rate=3e-3, eval_share=0.1)
    one = train(changed(student, backbone="", epochs=6))
    assert one["eval_distillation_mse"] < 0.02
    assert "eval_weighted_mse" not in one  # no labels were given
    model = RewardModel.from_pretrained(settings.out)
    assert type(model) is RadQ
    assert model.config.attributes == ["praise"]
    assert not [name for name in weights(settings.out) if "teacher" in name]
    assert (tmp_path / "teacher" / "model.safetensors").read_bytes() == before

    online = changed(student, backbone=str(calm_toy), out=str(tmp_path / "online"))
    cached = changed(online, cache_targets=True, out=str(tmp_path / "cached"))
    train(online)
    train(cached)
    assert losses(cached.out) == pytest.approx(losses(online.out), abs=1e-5)
    assert list((tmp_path / "cached" / "targets").iterdir())


def test_a_student_starts_from_its_teacher(calm_toy: Path) -> None:
    teacher = RadV.from_backbone(calm_toy, attributes=["a", "b"], response_range=(-1, 1))
    student = RadQ.from_teacher(teacher)
    assert student.config.attributes == ["a", "b"]
    assert student.config.response_range == [-1.0, 1.0]
    assert student.vocabulary == teacher.vocabulary
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        values = teacher.token_rewards(ids) - teacher.head.bias
        student.head.weight.zero_()
        torch.testing.assert_close(student.token_rewards(ids)[:, 1:], values[:, :-1])
    assert student.backbone is not teacher.backbone


def test_a_student_takes_backbone_layers_and_rank_from_a_teacher_with_adapters(
    settings: RewardTrainingConfig, tmp_path: Path
) -> None:
    train(changed(settings, kind="v", lora_rank=2, num_layers=1))
    student = changed(settings, backbone="", labels="", teacher=settings.out, out=str(tmp_path / "student"))
    train(student)
    stored = RewardModel.from_pretrained(student.out)
    assert isinstance(stored, RadQ)
    assert (stored.config.lora_rank, stored.config.backbone.num_hidden_layers) == (2, 1)  # pyright: ignore
    assert not (Path(student.out) / "model.safetensors").exists()  # adapters alone
    for name, given in (("num_layers", 2), ("lora_rank", 0)):
        with pytest.raises(OptionError, match=f"{name} is {given}, but the student starts as a copy of .* where it is"):
            train(changed(student, **{name: given}, out=str(tmp_path / "other")))


def test_a_student_of_adapters_starts_with_them(calm_toy: Path) -> None:
    teacher = RadV.from_backbone(calm_toy, attributes=["a"])
    teacher.add_lora(2, str(calm_toy))
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    student = RadQ.from_teacher(teacher)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        values = teacher.token_rewards(ids) - teacher.head.bias
        student.head.weight.zero_()
        torch.testing.assert_close(student.token_rewards(ids)[:, 1:], values[:, :-1])
    trained = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or name.startswith("head.") for name in trained)
    assert any("lora_" in name for name in trained)


def test_a_second_stage_goes_on_from_the_first(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    train(settings)
    second = changed(settings, backbone="", init=settings.out, out=str(tmp_path / "second"), learning_rate=1e-9)
    train(second)
    for name, values in weights(settings.out).items():
        torch.testing.assert_close(weights(second.out)[name], values, atol=1e-5, rtol=1e-3)
    train(changed(second, loss="ce", out=str(tmp_path / "entropy")))
    assert RewardModel.from_pretrained(tmp_path / "entropy").config.loss == "ce"  # not the first stage's
    with pytest.raises(OptionError, match="RadQ"):
        train(changed(second, kind="v", out=str(tmp_path / "third")))


def test_the_head_may_have_a_learning_rate_of_its_own(settings: RewardTrainingConfig, calm_toy: Path) -> None:
    train(changed(settings, head_learning_rate=0.0, weight_decay=0.0, max_steps=2))
    torch.manual_seed(settings.seed)
    first = RadQ.from_backbone(calm_toy, ["praise"])
    stored = weights(settings.out)
    torch.testing.assert_close(stored["head.weight"], first.head.state_dict()["weight"], atol=0, rtol=0)
    name = next(name for name in stored if name.endswith(("mlp.c_fc.weight", "mlp.up_proj.weight")))
    assert not torch.equal(stored[name], first.state_dict()[name])


def test_a_guide_folds_adapters_and_training_unfolds_them(settings: RewardTrainingConfig) -> None:
    train(changed(settings, lora_rank=4))
    model = RewardModel.from_pretrained(settings.out)
    ids, before = torch.tensor([[5, 6, 7]]), {name: value.clone() for name, value in model.state_dict().items()}
    rewards = model.next_rewards(ids)
    adapters = [module for module in model.backbone.modules() if hasattr(module, "lora_A")]
    RewardGuide(model, {"praise": 1.0})
    assert adapters
    assert all(adapter.folded for adapter in adapters)
    torch.testing.assert_close(model.next_rewards(ids), rewards)
    model.train()
    assert not any(adapter.folded for adapter in adapters)
    torch.testing.assert_close(model.state_dict(), before)


def test_adapters_and_head_are_all_a_lora_folder_holds(settings: RewardTrainingConfig) -> None:
    train(changed(settings, lora_rank=4))
    stored = weights(settings.out)
    assert any("lora_A" in name for name in stored)
    assert all(name.startswith("head.") or ".lora_" in name for name in stored)
    model = RewardModel.from_pretrained(settings.out)
    assert model.config.lora_rank == 4
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {name for name in model.state_dict() if not (name.startswith("head.") or ".lora_" in name)} == frozen
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        rewards = model.token_rewards(ids)
        plain = RadQ.from_backbone(settings.backbone, ["praise"])
        plain.head.load_state_dict(model.head.state_dict())
        assert not torch.allclose(plain.token_rewards(ids), rewards, atol=1e-4)  # the adapters matter
    model.save_pretrained(Path(settings.out) / "again")
    with torch.no_grad():
        assert torch.equal(RewardModel.from_pretrained(Path(settings.out) / "again").token_rewards(ids), rewards)
    (Path(settings.out) / "again" / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError):
        RewardModel.from_pretrained(Path(settings.out) / "again")


# --- what must not matter ---


@pytest.mark.parametrize("distils", [False, True])
def test_accumulation_does_not_change_the_losses(
    distils: bool, settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    settings = changed(settings, batch_size=24)  # and a last batch of 8
    if distils:
        RadV.from_backbone(calm_toy, attributes=["praise"]).save_pretrained(tmp_path / "teacher")
        settings = changed(settings, teacher=str(tmp_path / "teacher"))
    train(settings)
    for micro_batch_size in (3, 8):
        cut = changed(settings, micro_batch_size=micro_batch_size, out=str(tmp_path / f"cut{micro_batch_size}"))
        train(cut)
        assert losses(cut.out) == pytest.approx(losses(settings.out), abs=1e-5)


def test_the_logged_loss_is_the_loss_of_the_batch(settings: RewardTrainingConfig) -> None:
    from radq.data.dataset import GlobalBatches, load_data
    from radq.data.examples import DataColumns

    train(changed(settings, learning_rate=1e-12))
    torch.manual_seed(settings.seed)
    model = RadQ.from_backbone(settings.backbone, ["praise"])
    assert model.tokenizer is not None
    data = load_data(settings.data, model.tokenizer, DataColumns(labels=["praise"]), cache_folder=settings.cache)
    expected = []
    for indices in GlobalBatches(data.lengths, 16):
        batch = data.batch(indices)
        tokens = random_tokens(batch, model.vocabulary.size, 0, 0)
        with torch.no_grad():
            output = model(batch["input_ids"], batch["attention_mask"], tokens)
        loss = squared_loss(output.rewards, batch["loss_mask"], batch["labels"])
        expected.append((loss + baseline_loss(output.marginals, batch["loss_mask"])).item())
    assert losses(settings.out) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("distils", [False, True])
def test_loss_and_regulariser_agree_over_the_attributes(
    distils: bool, settings: RewardTrainingConfig, tmp_path: Path
) -> None:
    """Both are sums over attributes on labels, and both are means in distillation: written out by hand."""
    from radq.data.dataset import load_data
    from radq.data.examples import DataColumns

    pandas.DataFrame({"text": ["film", "plot"], "a": [0, 1], "b": [1, 0.5], "c": [0.5, 0]}).to_csv(
        tmp_path / "rows.csv", index=False
    )
    names = ["a", "b", "c"]
    torch.manual_seed(0)
    teacher = RadV.from_backbone(settings.backbone, names)
    teacher.save_pretrained(tmp_path / "teacher")
    three = changed(settings, data=[str(tmp_path / "rows.csv")], labels="a,b,c", max_steps=1, reg_weight=10.0)
    train(changed(three, teacher=str(tmp_path / "teacher")) if distils else three)

    torch.manual_seed(settings.seed)
    model = RadQ.from_backbone(settings.backbone, names)
    assert model.tokenizer is not None
    batch = load_data(three.data, model.tokenizer, DataColumns(labels=names), cache_folder=settings.cache).batch([0, 1])
    with torch.no_grad():
        output = model(batch["input_ids"], batch["attention_mask"], random_tokens(batch, model.vocabulary.size, 0, 0))
        wanted = teacher.token_rewards(batch["input_ids"])[:, 0] if distils else batch["labels"]  # one token each
    squares = (output.rewards[:, 0] - wanted).square() + 10 * output.marginals[:, 0].square()  # (2 texts, 3 attributes)
    assert losses(settings.out) == pytest.approx([squares.sum().item() / 2 / (3 if distils else 1)], rel=1e-4)


def test_random_tokens_belong_to_rows_and_are_uniform() -> None:
    rows = torch.arange(3000)
    batch = {"rows": rows, "input_ids": torch.zeros(3000, 20, dtype=torch.long)}
    tokens = random_tokens(batch, 50, seed=1, epoch=2)
    assert tokens.min() >= 0
    frequency = tokens.flatten().bincount(minlength=50) / tokens.numel()
    assert (frequency - 1 / 50).abs().max() < 0.003
    part = {"rows": rows[7:9], "input_ids": torch.zeros(2, 5, dtype=torch.long)}
    assert torch.equal(random_tokens(part, 50, 1, 2), tokens[7:9, :5])
    assert not torch.equal(random_tokens(part, 50, 1, 3), tokens[7:9, :5])


def arguments(settings: RewardTrainingConfig, **more: Any) -> list[str]:
    values = {"data": settings.data[0], "labels": settings.labels, "backbone": settings.backbone, "out": settings.out}
    values |= {"cache": settings.cache, "epochs": settings.epochs, "batch_size": settings.batch_size, "log_steps": 1}
    values |= {"learning_rate": settings.learning_rate, "recipe": settings.recipe, **more}
    return [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # of torch's reducer
def test_two_processes_have_the_losses_of_one(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    train(settings)
    two = changed(settings, out=str(tmp_path / "two"))
    assert run_in_two_processes(lambda: main(["train", *arguments(two), "--json"])) == [0, 0]
    assert losses(two.out) == pytest.approx(losses(settings.out), abs=1e-5)
    assert type(RewardModel.from_pretrained(two.out)) is RadQ


def test_a_killed_run_resumes_to_the_same_weights(settings: RewardTrainingConfig, toy: Path, tmp_path: Path) -> None:
    settings = changed(settings, backbone=str(toy), epochs=2)  # with dropout
    command = ["train", "--save-steps", "10", "--json"]
    whole = changed(settings, out=str(tmp_path / "whole"))
    assert main([*command, *arguments(whole)]) == 0

    function = "radq.training.reward_trainer:BatchTrainer._save_checkpoint"
    run_and_kill(function, 1, [*command, *arguments(settings)])
    assert [path.name for path in find_checkpoints(settings.out)] == ["checkpoint-10"]
    assert not (Path(settings.out) / "model.safetensors").exists()
    half = Path(settings.out) / ".saving" / "checkpoint-9999"  # as a kill in the middle of saving leaves it
    half.mkdir(parents=True)

    assert main(["train", "--resume", "--out", settings.out, "--json"]) == 0
    assert losses(settings.out) == losses(whole.out)
    for name, values in weights(whole.out).items():
        assert torch.equal(weights(settings.out)[name], values), name


# --- a run folder ---


def test_a_run_folder_tells_what_happened(settings: RewardTrainingConfig) -> None:
    with pytest.warns(UserWarning, match="does not beat a constant: its .* to the labels is 0.*, that of a constant 0"):
        metrics = train(changed(settings, eval_share=0.2, eval_steps=5, save_steps=4))
    assert metrics["eval_constant_loss"] == pytest.approx(metrics["eval_constant_weighted_mse"])
    out = Path(settings.out)
    stored = read_yaml(out / "config.yaml", RewardTrainingConfig)
    assert stored.labels == "praise"
    assert stored.eval_share == 0.2
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 11))
    assert [line["step"] for line in lines if "eval_weighted_mse" in line][:2] == [5, 10]
    assert all(line["tokens_per_second"] > 0 for line in lines if "loss" in line)
    assert metrics["eval_weighted_mse"] > 0
    assert [path.name for path in find_checkpoints(out)] == ["checkpoint-8", "checkpoint-10"]
    assert not (out / ".saving").exists()
    assert RewardModel.from_pretrained(out).config.response_range == [0.0, 1.0]


def test_a_run_is_not_overwritten_by_accident(settings: RewardTrainingConfig) -> None:
    train(settings)
    with pytest.raises(OptionError, match="holds a run already.*--resume"):
        train(settings)
    first = losses(settings.out)
    train(changed(settings, seed=1), overwrite=True)
    assert losses(settings.out) != first
    assert len(losses(settings.out)) == len(first)


def test_a_full_disk_leaves_the_last_checkpoint(
    settings: RewardTrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    original = Trainer._save_optimizer_and_scheduler

    def full(self: Trainer, output_dir: str) -> None:
        if self.state.global_step == 8:
            raise OSError("No space left on device")
        original(self, output_dir)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(OSError, match="No space"):
        train(changed(settings, save_steps=4))
    assert [path.name for path in find_checkpoints(settings.out)] == ["checkpoint-4"]
    monkeypatch.undo()
    train(changed(settings, save_steps=4), resume=True)
    assert (Path(settings.out) / "model.safetensors").exists()


def test_labels_outside_the_unit_interval_set_the_range(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    rows = pandas.DataFrame({"text": ["the film was good ."] * 8, "stars": [1, 2, 3, 4, 5, 5, 5, 1]})
    rows.to_csv(tmp_path / "stars.csv", index=False)
    stars = changed(settings, data=[str(tmp_path / "stars.csv")], labels="stars", keep_labels=True, max_steps=1)
    train(stars)
    assert RewardModel.from_pretrained(settings.out).config.response_range == [1.0, 5.0]
    with pytest.raises(DataError, match="from 1 to 5.*keep-labels"):
        train(changed(stars, loss="ce"), overwrite=True)
    train(changed(stars, loss="ce", keep_labels=False), overwrite=True)
    assert RewardModel.from_pretrained(settings.out).config.response_range == [0.0, 1.0]
    assert RewardModel.from_pretrained(settings.out).config.loss == "ce"


# --- metrics ---


def test_metrics_by_hand() -> None:
    stats = np.array([[0.2, 0.9, 0.1, 0.3], [0.8, 0.1, 0.3, 0.1]])  # last rewards of two attributes, weighted errors
    labels = np.array([[0.0, 0.5], [1.0, 0.5]])
    metrics = compute_metrics(stats, labels, ["a", "b"])
    assert metrics["weighted_mse"] == pytest.approx(0.2)
    assert metrics["last_token_mse"] == pytest.approx((0.04 + 0.16 + 0.04 + 0.16) / 4)
    assert metrics["auc_a"] == metrics["accuracy_a"] == 1.0
    assert "auc_b" not in metrics
    assert metrics["weighted_mse_a"] == pytest.approx(0.2)
    # distance, tokens, sum and squares of a teacher that gives 0, 0, 4 and 4
    distilled = compute_metrics(np.array([[0.5, 6, 3, 4, 16], [0.5, 2, 1, 4, 16]]), np.empty((2, 0)), ["a"])
    assert distilled == {"distillation_mse": 2.0, "constant_distillation_mse": 4.0}


def test_constants_by_hand() -> None:
    labels, weights = np.array([[0.0, 1.0], [1.0, 1.0]]), np.array([1.0, 3.0])
    found = constant_metrics(labels, weights, np.array([0.75, 0.5]), ["a", "b"], "mse")
    a, b = (0.5625 + 0.0625) / 2, 0.25
    assert found["constant_weighted_mse_a"] == pytest.approx(a)
    assert found["constant_weighted_mse_b"] == pytest.approx(b)
    assert found["constant_weighted_mse"] == pytest.approx((a + b) / 2)
    assert found["constant_loss"] == pytest.approx(((0.5625 + 0.25) + 3 * (0.0625 + 0.25)) / 2)
    entropy = constant_metrics(labels, weights, np.array([0.75, 0.5]), ["a", "b"], "ce")
    first, second = -math.log(0.25) - math.log(0.5), -math.log(0.75) - math.log(0.5)
    assert entropy["constant_loss"] == pytest.approx((first + 3 * second) / 2)


# --- mistakes ---


def test_mistakes_are_named(settings: RewardTrainingConfig, calm_toy: Path, lm_folders: dict[str, Path]) -> None:
    for change, message in [
        ({"data": []}, "no data"),
        ({"out": ""}, "no run folder"),
        ({"labels": ""}, "no labels"),
        ({"backbone": ""}, "no model to start from"),
        ({"batch_size": 0}, "batch_size must be at least 1.*got 0"),
        ({"lora_rank": 4, "backbone": "", "init": "x"}, "lora_rank must be 0 without a backbone, got 4"),
        ({"eval_share": 1.0}, "eval_share must be .*less than 1, got 1.0"),
        ({"labels": "praise,blame"}, "no column 'blame'.*text, praise"),
        ({"teacher": "x", "kind": "v"}, "kind must be q in distillation, got 'v'"),
        ({"backbone": str(lm_folders["gpt2"])}, "no tokenizer"),
    ]:
        with pytest.raises((OptionError, DataError, ModelError), match=message):
            train(changed(settings, **change))


def test_teachers_that_do_not_fit(settings: RewardTrainingConfig, calm_toy: Path, toy: Path, tmp_path: Path) -> None:
    RadV.from_backbone(calm_toy, attributes=["blame"]).save_pretrained(tmp_path / "blame")
    with pytest.raises(OptionError, match="teacher's attributes are blame.*praise"):
        train(changed(settings, teacher=str(tmp_path / "blame")))
    RadQ.from_backbone(calm_toy, attributes=["praise"]).save_pretrained(tmp_path / "q")
    with pytest.raises(OptionError, match="cannot start as a copy .* not one RAD-V"):
        train(changed(settings, teacher=str(tmp_path / "q"), backbone=""))
    other = RadV.from_backbone(calm_toy, attributes=["praise"])
    other.config.vocabulary = [*other.config.vocabulary[:2], "another"]  # pyright: ignore[reportOptionalSubscript]
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(VocabularyError, match="other"):
        train(changed(settings, teacher=str(tmp_path / "other")))


def test_a_constant_label_is_warned_of(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    pandas.DataFrame({"text": ["film", "plot"], "praise": [1, 1]}).to_csv(tmp_path / "same.csv", index=False)
    with pytest.warns(UserWarning, match="'praise' is 1 in every row"):
        train(changed(settings, data=[str(tmp_path / "same.csv")]))


# --- the command line ---


def test_settings_come_from_yaml_and_flags_win(
    settings: RewardTrainingConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"data: [{settings.data[0]}]\nlabels: praise\nbackbone: {settings.backbone}\nbatch_size: 50\n")
    out = ["--out", settings.out, "--cache", str(settings.cache)]
    assert main(["train", "--config", str(file), *out, "--max-steps", "2", "--batch-size", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train_loss"] > 0
    stored = read_yaml(Path(settings.out) / "config.yaml", RewardTrainingConfig)
    assert (stored.batch_size, stored.max_steps, stored.labels) == (20, 2, "praise")

    file.write_text("learning_rate: 1e-5\nepochs: 3\nlabel_range: [1, 5]\n")  # YAML takes 1e-5 for a text
    numbers = read_yaml(file, RewardTrainingConfig)
    assert (numbers.learning_rate, numbers.epochs, numbers.label_range) == (1e-5, 3.0, (1.0, 5.0))
    for wrong in ("learning_rate: fast", "batch_size: many", "label_range: 3"):
        file.write_text(wrong)
        with pytest.raises(OptionError, match="number"):
            read_yaml(file, RewardTrainingConfig)
    file.write_text("learning_rat: 1\n")
    assert main(["train", "--config", str(file), *out]) == 2
    assert "learning_rat" in capsys.readouterr().err
    assert main(["train", "--config", str(tmp_path / "none.yaml"), *out]) == 2
    assert main(["train", *arguments(settings)]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_distil_from_the_command_line(
    settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RadV.from_backbone(calm_toy, attributes=["praise"]).save_pretrained(tmp_path / "teacher")
    argv = ["--data", settings.data[0], "--out", settings.out, "--cache", str(settings.cache), "--max-steps", "2"]
    teacher = ["--teacher", str(tmp_path / "teacher")]
    assert main(["distill", *teacher, *argv, "--online", "--cache-targets"]) == 2
    assert "choose one" in capsys.readouterr().err
    assert main(["distill", *teacher, *argv, "--online"]) == 0
    assert "RAD-Q" in capsys.readouterr().out
    assert type(RewardModel.from_pretrained(settings.out)) is RadQ
    assert main(["distill", *argv]) == 2
    assert "no teacher" in capsys.readouterr().err
