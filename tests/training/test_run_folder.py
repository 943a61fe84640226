"""Run folders: nothing else is written over, targets belong to teacher and rows, and a run goes on as it was begun."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from instruments import full_disk
from safetensors.torch import load_file, save_file
from training_runs import changed, lines, losses, make_settings, weights

from radq.cli import main
from radq.errors import DataError, ModelError, OptionError, TrainingError, WriteError
from radq.models.kinds import RadQ, RadV
from radq.models.reward import RewardModel
from radq.toy import make_reviews
from radq.training.config import ExpertTrainingConfig, RewardTrainingConfig
from radq.training.experts import train_experts
from radq.training.reward import train
from radq.training.run_folder import FINGERPRINTS, find_checkpoints, find_damage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:on the evaluation data the model does not beat a constant"),
]


@pytest.fixture
def settings(calm_toy: Path, tmp_path: Path) -> RewardTrainingConfig:
    sizes = {"num_layers": 1, "batch_size": 8, "learning_rate": 1e-3, "log_steps": 1, "max_steps": 4}
    return make_settings(tmp_path, 64, calm_toy, labels="praise", recipe="paper", **sizes)


def same_weights(one: str | Path, other: str | Path) -> bool:
    first, second = weights(one), weights(other)
    return all(torch.equal(first[name], second[name]) for name in first)


# --- targets of a teacher ---


def make_teacher(folder: Path, backbone: Path, seed: int, lora: bool = False) -> str:
    torch.manual_seed(seed)
    model = RadV.from_backbone(backbone, attributes=["praise"])
    if lora:
        model.add_lora(2, str(backbone))
    torch.nn.init.normal_(model.head.weight, std=0.1)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("lora", [False, True])
def test_cached_targets_belong_to_their_teacher(
    lora: bool, settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    one, two = (make_teacher(tmp_path / name, calm_toy, seed, lora) for seed, name in enumerate("ab"))
    cached = changed(settings, teacher=one, cache_targets=True)
    train(cached)
    train(changed(cached, teacher=two), overwrite=True)
    online = changed(settings, teacher=two, out=str(tmp_path / "online"))
    train(online)
    for name, values in weights(online.out).items():
        torch.testing.assert_close(weights(settings.out)[name], values, atol=1e-5, rtol=1e-4)
    assert len(list((Path(settings.out) / "targets").iterdir())) == 1  # of the second teacher alone


def test_train_and_eval_splits_share_the_targets_of_their_texts(
    settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    teacher = make_teacher(tmp_path / "teacher", calm_toy, 0)
    online = changed(settings, teacher=teacher, eval_share=0.5)  # of equal length, so that lengths tell nothing
    cached = changed(online, cache_targets=True, out=str(tmp_path / "cached"))
    expected, found = train(online), train(cached)
    assert found["eval_distillation_mse"] == pytest.approx(expected["eval_distillation_mse"], rel=1e-3)
    assert losses(cached.out) == pytest.approx(losses(online.out), rel=1e-3)
    (file,) = (tmp_path / "cached" / "targets").glob("*/*.bin")
    assert np.all(np.fromfile(file, np.float32) != 0)  # of the rows of both


@pytest.mark.parametrize("limits", [{"epochs": 2, "max_steps": -1}, {"max_steps": 9}])
def test_targets_are_stored_if_texts_are_read_repeatedly(
    limits: dict[str, Any], settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    teacher = make_teacher(tmp_path / "teacher", calm_toy, 0)
    repeated = changed(settings, teacher=teacher, **limits)
    online = changed(repeated, online=True, out=str(tmp_path / "online"))
    once = changed(settings, teacher=teacher, epochs=1, max_steps=-1, out=str(tmp_path / "once"))
    for config in (repeated, online, once):
        train(config)
    assert [(Path(one.out) / "targets").exists() for one in (repeated, online, once)] == [True, False, False]
    for name, values in weights(online.out).items():
        torch.testing.assert_close(weights(repeated.out)[name], values, atol=1e-5, rtol=1e-4)


def test_a_disk_without_room_for_targets(
    settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = make_teacher(tmp_path / "teacher", calm_toy, 0)
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    with pytest.raises(WriteError, match="the teacher's rewards need .* are free") as error:
        train(changed(settings, teacher=teacher, max_steps=9))
    assert "--online" in (error.value.hint or "")


# --- what a run folder may hold before ---


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_holds_something_else_is_refused(
    overwrite: bool, settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    out = Path(settings.out)
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"a language model")
    (out / "config.yaml").write_text("model: gpt2\nlearning_rate: 1\n")  # of another program
    experts = ExpertTrainingConfig(data=settings.data, labels="praise", backbone=str(calm_toy), out=settings.out)
    for begin in (lambda: train(settings, False, overwrite), lambda: train_experts(experts, False, overwrite)):
        with pytest.raises(OptionError, match="holds other files, not a radq run.*new or empty"):
            begin()
    assert (out / "model.safetensors").read_bytes() == b"a language model"
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="is a file"):
        train(changed(settings, out=str(tmp_path / "file")), False, overwrite)


def test_an_empty_folder_and_an_earlier_run_are_written_to(settings: RewardTrainingConfig) -> None:
    out = Path(settings.out)
    out.mkdir()
    train(changed(settings, max_steps=1))
    (out / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match="both --resume and --overwrite"):
        train(settings, resume=True, overwrite=True)
    train(changed(settings, max_steps=2), overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert [path.name for path in find_checkpoints(out)] == ["checkpoint-2"]


# --- losses that are no numbers ---


@pytest.mark.parametrize("log_steps", [1, 1000])  # losses are read when they are logged, and before weights are saved
def test_a_loss_that_is_no_number_stops_the_run(log_steps: int, settings: RewardTrainingConfig, tmp_path: Path) -> None:
    rows = pandas.DataFrame(make_reviews(64), columns=["text", "praise"])
    rows.loc[40, "praise"] = 1e38  # a number in single precision, whose square is none
    rows.to_csv(tmp_path / "large.csv", index=False)
    large = changed(settings, data=[str(tmp_path / "large.csv")], keep_labels=True, epochs=1, max_steps=-1)
    large = changed(large, log_steps=log_steps, save_steps=1)
    with pytest.raises(
        TrainingError, match=r"loss is (inf|nan) at step \d+, in a batch with the rows .*learning-rate"
    ) as caught:
        train(large)
    step = int(caught.value.message.split("step ")[1].split(",")[0])
    kept = [path.name for path in find_checkpoints(large.out)]
    assert kept == [f"checkpoint-{n}" for n in range(1, step)][-2:]
    assert not kept or kept[-1] in str(caught.value)
    assert not (Path(large.out) / "model.safetensors").exists()
    assert all(np.isfinite(line["loss"]) for line in lines(large.out))


def test_the_first_loss_that_is_no_number_is_named_at_the_end_of_a_run(
    settings: RewardTrainingConfig, tmp_path: Path
) -> None:
    rows = pandas.DataFrame(make_reviews(64), columns=["text", "praise"])
    rows.loc[40, "praise"] = 1e38
    rows.to_csv(tmp_path / "large.csv", index=False)
    large = changed(settings, data=[str(tmp_path / "large.csv")], keep_labels=True, epochs=1, max_steps=-1)
    with pytest.raises(TrainingError, match=r"loss is (inf|nan) at step \d+, in a batch with the rows .*\b41\b"):
        train(changed(large, save_steps=1000, log_steps=1000, batch_size=8))
    assert not find_checkpoints(large.out)
    assert not (Path(large.out) / "model.safetensors").exists()


def test_weights_that_are_no_numbers_are_not_saved(
    settings: RewardTrainingConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "--data", *settings.data, "--labels", "praise", "--backbone", settings.backbone, "--json"]
    argv += ["--out", settings.out, "--cache", str(settings.cache), "--max-steps", "1", "--learning-rate", "1000"]
    argv += ["--adam-epsilon", "0", "--max-grad-norm", "0"]
    assert main(argv) == 2
    assert "not finite after step 1" in capsys.readouterr().err
    assert not (Path(settings.out) / "model.safetensors").exists()
    assert not find_checkpoints(settings.out)


# --- the best evaluation ---


def rising(settings: RewardTrainingConfig, **changes: Any) -> RewardTrainingConfig:
    """A run that gets worse from some step on: its rate is far too high."""
    wild = {"learning_rate": 0.3, "max_steps": 12, "eval_share": 0.25, "eval_steps": 2, "save_steps": 5, "seed": 1}
    return changed(settings, **(wild | {"metric": "weighted_mse"} | changes))


def evaluations(run: str | Path) -> dict[int, float]:
    """The evaluations of a run by their steps, each of which has one."""
    found = [line for line in lines(run) if "eval_weighted_mse" in line]
    assert len({line["step"] for line in found}) == len(found)
    return {line["step"]: line["eval_weighted_mse"] for line in found}


@pytest.mark.parametrize("lora", [0, 2])
def test_a_run_ends_with_its_best_weights(lora: int, settings: RewardTrainingConfig) -> None:
    best = rising(settings, lora_rank=lora)
    metrics = train(best)
    found = evaluations(best.out)
    step = min(found, key=lambda step: found[step])
    assert metrics["best_step"] == step
    assert metrics["eval_weighted_mse"] == pytest.approx(found[step], rel=1e-5)
    assert metrics["eval_weighted_mse"] < found[2 if step == 12 else 12]
    assert same_weights(best.out, Path(best.out) / f"checkpoint-{step}")
    kept = {path.name for path in find_checkpoints(best.out)}
    assert f"checkpoint-{step}" in kept  # though it is older than the last two
    assert len(kept) <= 3


def test_a_run_stops_early_and_stops_there_again_when_resumed(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    best = rising(settings, early_stopping=2, max_steps=40)
    metrics = train(best)
    found = evaluations(best.out)
    assert max(found) == metrics["best_step"] + 2 * 2 < 40
    whole = changed(best, out=str(tmp_path / "whole"))
    train(whole)
    (Path(best.out) / "model.safetensors").unlink()
    assert train(best, resume=True)["best_step"] == metrics["best_step"]
    assert evaluations(best.out) == found
    assert same_weights(best.out, whole.out)


def test_the_best_may_be_asked_for_as_transformers_calls_it(settings: RewardTrainingConfig) -> None:
    trainer = {"load_best_model_at_end": True, "metric_for_best_model": "weighted_mse"}
    asked = rising(settings, metric=None, trainer=trainer, max_steps=4)
    metrics = train(asked)
    assert metrics["eval_weighted_mse"] == pytest.approx(min(evaluations(asked.out).values()), rel=1e-5)


def test_the_best_of_nothing_is_refused(settings: RewardTrainingConfig) -> None:
    for change in ({"metric": "loss"}, {"early_stopping": 3}, {"load_best_model_at_end": True}):
        with pytest.raises(OptionError, match="need data to evaluate on.*--eval-share"):
            train(changed(settings, **change))
    with pytest.raises(OptionError, match="metric must be one of loss, weighted_mse.*got 'bleu'"):
        train(changed(settings, metric="bleu", eval_share=0.25))


# --- resuming ---


def test_a_run_goes_on_only_as_it_was_begun(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    begun = changed(settings, save_steps=2)
    train(begun)
    for change, message in [
        ({"learning_rate": 0.5}, "learning_rate from 0.001 to 0.5 changed"),
        ({"seed": 1, "max_steps": 9}, "max_steps from 4 to 9; seed from 0 to 1 changed"),
        ({"eval_share": 0.1}, "eval_share from 0.0 to 0.1; the contents of data; the contents of eval_data changed"),
        ({"trainer": {"optim": "adafactor"}}, "trainer from {} to"),
    ]:
        with pytest.raises(OptionError, match=message):
            train(changed(begun, **change), resume=True)
    moved = tmp_path / "moved.csv"
    moved.write_bytes(Path(settings.data[0]).read_bytes())
    harmless = changed(begun, data=[str(moved)], cache=str(tmp_path / "other"), log_steps=3, save_steps=1)
    train(changed(harmless, micro_batch_size=4), resume=True)
    moved.write_text(moved.read_text().replace("good", "bad"))
    with pytest.raises(OptionError, match="cannot go on: the contents of data changed.*--overwrite.*log_steps"):
        train(harmless, resume=True)


def test_a_student_goes_on_with_its_teacher_alone(
    settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    student = changed(settings, teacher=make_teacher(tmp_path / "teacher", calm_toy, 0))
    train(student)
    shutil.copytree(tmp_path / "teacher", tmp_path / "moved")
    train(changed(student, teacher=str(tmp_path / "moved")), resume=True)
    make_teacher(tmp_path / "teacher", calm_toy, 1)
    with pytest.raises(OptionError, match="the contents of teacher changed"):
        train(student, resume=True)


@pytest.mark.parametrize(
    ("begins", "changed_file", "named"),
    [
        ({}, "model.safetensors", "backbone_files"),  # trained weights, which a checkpoint holds already
        ({"lora_rank": 2}, "config.json", "backbone_files"),
        ({"init": "start", "backbone": ""}, "model.safetensors", "init"),
    ],
)
def test_a_run_goes_on_with_the_model_it_began_with_alone(
    begins: dict[str, Any], changed_file: str, named: str, settings: RewardTrainingConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "start"
    if "init" in begins:
        RadQ.from_backbone(settings.backbone, ["praise"]).save_pretrained(folder)
    else:
        shutil.copytree(settings.backbone, folder)
    begins = begins | {name: str(folder) for name in ("init", "backbone") if name == named.removesuffix("_files")}
    begun = changed(settings, max_steps=1, **begins)
    train(begun)
    train(begun, resume=True)
    if changed_file == "config.json":
        config = json.loads((folder / changed_file).read_text())
        (folder / changed_file).write_text(json.dumps(config | {"layer_norm_epsilon": 0.01}))
    else:
        tensors = load_file(folder / changed_file)
        tensors[next(name for name in tensors if "mlp" in name)] += 0.1
        save_file(tensors, folder / changed_file, {"format": "pt"})
    with pytest.raises(OptionError, match=f"the contents of {named} changed"):
        train(begun, resume=True)
    fingerprints = json.loads((Path(begun.out) / FINGERPRINTS).read_text())
    del fingerprints[named]  # as in a run of an older radq
    (Path(begun.out) / FINGERPRINTS).write_text(json.dumps(fingerprints))
    train(begun, resume=True)


def test_a_changed_interval_holds_from_the_resumed_step_on(
    settings: RewardTrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    whole = changed(settings, save_steps=2, max_steps=8, out=settings.out + "-whole")
    train(whole)
    monkeypatch.setattr(Trainer, "training_step", stop_at(3))
    with pytest.raises(KeyboardInterrupt):
        train(changed(settings, save_steps=2, max_steps=8))
    monkeypatch.undo()
    train(changed(settings, save_steps=3, max_steps=8), resume=True)
    assert [path.name for path in find_checkpoints(settings.out)] == ["checkpoint-6", "checkpoint-8"]
    assert same_weights(settings.out, whole.out)


def stop_at(step: int) -> Any:
    from transformers import Trainer

    original, taken = Trainer.training_step, [0]

    def training_step(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        taken[0] += 1
        if taken[0] == step:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    return training_step


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state.pth"])
def test_a_damaged_checkpoint_is_passed_over(
    file: str, settings: RewardTrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    monkeypatch.setattr(Trainer, "training_step", stop_at(4))
    with pytest.raises(KeyboardInterrupt):
        train(changed(settings, save_steps=1, max_steps=6))
    monkeypatch.undo()
    older, newest = find_checkpoints(settings.out)
    whole = (newest / file).read_bytes()
    (newest / file).write_bytes(whole[: len(whole) // 2] + bytes(len(whole) // 2))  # zeros, as a power cut leaves them
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged .*goes on from {older.name}"):
        train(changed(settings, save_steps=1, max_steps=6), resume=True)
    train(changed(settings, max_steps=6, out=settings.out + "-whole"))
    assert same_weights(settings.out, settings.out + "-whole")
    for checkpoint in find_checkpoints(settings.out):
        assert find_damage(checkpoint) is None
        (checkpoint / file).unlink()
    with pytest.raises(ModelError, match="damaged.*no checkpoint is left"):
        train(changed(settings, save_steps=1, max_steps=6), resume=True)


# --- full disks ---


def test_a_full_disk_is_one_line_and_leaves_what_was_there(
    settings: RewardTrainingConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = changed(settings, save_steps=2)
    train(changed(begun, max_steps=2))
    before = (Path(settings.out) / "model.safetensors").read_bytes()
    saved = RewardModel.from_pretrained(settings.out)
    with full_disk(len(before) // 2), pytest.raises((WriteError, OSError)):
        saved.save_pretrained(settings.out)
    assert (Path(settings.out) / "model.safetensors").read_bytes() == before

    argv = ["train", "--data", *settings.data, "--labels", "praise", "--backbone", settings.backbone, "--json"]
    argv += ["--out", str(tmp_path / "full"), "--cache", str(settings.cache), "--max-steps", "3", "--save-steps", "1"]
    for size in (len(before) // 2, len(before) + len(before) // 2, 100):  # weights, optimizer, settings
        with full_disk(size):
            assert main([*argv, "--overwrite"]) == 2
        assert "error: cannot write" in capsys.readouterr().err
        assert not find_checkpoints(tmp_path / "full")
        assert not (tmp_path / "full" / ".saving").exists()
        assert not (tmp_path / "full" / "model.safetensors").exists()


# --- data that nothing can be learnt from ---


def test_weights_of_zero_and_one_row_are_refused(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    rows = pandas.DataFrame({"text": ["film", "plot"], "praise": [0, 1], "w": [0, 0]})
    rows.to_csv(tmp_path / "zero.csv", index=False)
    with pytest.raises(DataError, match="'w' is 0 in all rows to train on"):
        train(changed(settings, data=[str(tmp_path / "zero.csv")], weight="w"))
    rows[:1].to_csv(tmp_path / "one.csv", index=False)
    with pytest.raises(DataError, match="leaves none to train on"):
        train(changed(settings, data=[str(tmp_path / "one.csv")], eval_share=0.5))


def test_each_attribute_has_its_range(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    rows = pandas.DataFrame(make_reviews(16), columns=["text", "praise"])
    rows["stars"] = 1 + 4 * rows["praise"]
    rows.to_csv(tmp_path / "two.csv", index=False)
    two = changed(settings, data=[str(tmp_path / "two.csv")], labels="praise,stars", max_steps=1)
    train(changed(two, keep_labels=True))
    model = RewardModel.from_pretrained(settings.out)
    assert model.config.response_range == [[0.0, 1.0], [1.0, 5.0]]
    assert model.config.attribute_ranges == [(0.0, 1.0), (1.0, 5.0)]


# --- precision ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_frozen_backbone_may_be_held_in_half_precision(
    dtype: str, settings: RewardTrainingConfig, tmp_path: Path
) -> None:
    lora = changed(settings, lora_rank=2)
    train(changed(lora, out=str(tmp_path / "float32")))
    half = changed(lora, backbone_dtype=dtype, save_steps=2)
    train(half)
    assert all(values.dtype == torch.float32 for values in weights(half.out).values())
    losses = [[line["loss"] for line in lines(run) if "loss" in line] for run in (half.out, tmp_path / "float32")]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    train(changed(half, out=settings.out), resume=True)
    for change, message in [
        ({"backbone_dtype": dtype}, "backbone_dtype must be float32.*--lora-rank"),
        ({"lora_rank": 10_000}, "lora_rank must be at most .*width.*got 10000"),
        ({"precision": "float16"}, "precision float16 needs a GPU"),
    ]:
        with pytest.raises(OptionError, match=message):
            train(changed(settings, out=str(tmp_path / "refused"), **change))


def test_bfloat16_works_on_any_processor(settings: RewardTrainingConfig) -> None:
    metrics = train(changed(settings, precision="bfloat16", max_steps=2))
    assert np.isfinite(metrics["train_loss"])


def test_a_second_stage_from_half_precision_trains_in_float32(
    settings: RewardTrainingConfig, calm_toy: Path, tmp_path: Path
) -> None:
    RadQ.from_backbone(calm_toy, ["praise"], num_layers=1, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    train(changed(settings, backbone="", num_layers=None, init=str(tmp_path / "half"), max_steps=1))
    assert all(values.dtype == torch.float32 for values in weights(settings.out).values())
