"""Training of experts: DExperts and GeDi learn from labelled texts, and then steer."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from safetensors.torch import load_file
from training_runs import changed, losses, write_reviews
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from radq.cli import main
from radq.decoding.generate import generate
from radq.errors import DataError, MemoryLimitError, OptionError, WriteError
from radq.guides.base import Prompts
from radq.guides.dexperts import DExpertsGuide
from radq.guides.gedi import GeDiGuide
from radq.guides.spec import GuideSpec, guide_maker, load_guide, load_guides
from radq.models.kinds import RadQ
from radq.models.prefill import finish
from radq.settings import read_yaml
from radq.toy import BAD, GOOD, make_reviews, make_tokenizer
from radq.training.config import ExpertTrainingConfig
from radq.training.experts import ExpertTrainer, score_classes, train_experts
from radq.training.losses import gedi_loss, text_loss
from radq.training.run_folder import find_checkpoints

pytestmark = pytest.mark.slow

METHODS = ["dexperts", "gedi"]


@pytest.fixture(scope="session")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reviews(tmp_path_factory.mktemp("data") / "reviews.csv", 600)


@pytest.fixture
def settings(reviews: Path, calm_toy: Path, tmp_path: Path) -> ExpertTrainingConfig:
    return ExpertTrainingConfig(
        data=[str(reviews)],
        labels="praise",
        backbone=str(calm_toy),
        out=str(tmp_path / "run"),
        cache=str(tmp_path / "cache"),
        code_high="good",
        code_low="bad",
        epochs=1,
        batch_size=32,
        learning_rate=1e-3,
        log_steps=1,
    )


def part(settings: ExpertTrainingConfig) -> Path:
    return Path(settings.out) / ("expert" if settings.method == "dexperts" else "")


# --- losses ---


def test_losses_by_hand() -> None:
    log_probabilities = torch.tensor([[0.5, 0.25, 0.1], [0.2, 0.9, 0.9]]).log()
    mask, weights = torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([1.0, 2.0])
    expected = -(math.log(0.5) + math.log(0.25) + 2 * math.log(0.2)) / 3
    assert text_loss(log_probabilities, mask, weights).item() == pytest.approx(expected)
    posterior = torch.tensor([0.6, 0.3]).log()
    first = 0.8 * -(math.log(0.5) + math.log(0.25)) / 2 - 0.2 * math.log(0.6)
    second = 0.8 * -math.log(0.2) - 0.2 * math.log(0.3)
    loss = gedi_loss(log_probabilities, posterior, mask, weights, 0.8)
    assert loss.item() == pytest.approx((first + 2 * second) / 2)
    nothing = torch.zeros(2, 3, dtype=torch.long)
    assert text_loss(log_probabilities, nothing, weights).item() == 0
    assert gedi_loss(log_probabilities, posterior, nothing, weights, 0.8).item() == 0


def test_classes_are_read_in_one_batch_as_alone(toy_lm: PreTrainedModel) -> None:
    heads, ids = [[0, 5, 6], [0, 7]], torch.tensor([[8, 9, 10, 0], [11, 12, 13, 14]])
    with torch.no_grad():
        scores = score_classes(toy_lm, heads, ids)
        for c, head in enumerate(heads):
            for row, length in enumerate([3, 4]):
                text = ids[row, :length].tolist()
                logits = toy_lm(input_ids=torch.tensor([[*head, *text]])).logits[0].log_softmax(-1)
                expected = [logits[len(head) - 1 + j, token].item() for j, token in enumerate(text)]
                assert scores[c, row, :length].tolist() == pytest.approx(expected, abs=1e-4)


# --- what is learnt ---


def praise(lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, guide: Any) -> float:
    """Share of good words among the adjectives of generated reviews."""
    prompts = ["the film was", "this plot", ""]
    texts = [g.text for g in generate(lm, tokenizer, prompts, guide, samples=20, max_new_tokens=10)]
    words = [word for text in texts for word in text.split()]
    good, bad = (sum(word in known for word in words) for known in (GOOD, BAD))
    return good / (good + bad)


@pytest.mark.parametrize("method", METHODS)
def test_experts_trained_on_reviews_lift_praise(
    method: str,
    settings: ExpertTrainingConfig,
    toy_lm: PreTrainedModel,
    toy_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
) -> None:
    clear = [review for review in make_reviews(1200) if review[1] != 0.5]  # all good or all bad
    pandas.DataFrame(clear, columns=["text", "praise"]).to_csv(tmp_path / "clear.csv", index=False)
    settings = changed(settings, data=[str(tmp_path / "clear.csv")])
    options = {"epochs": 4} if method == "dexperts" else {"epochs": 12, "gen_weight": 0.2}
    metrics = train_experts(changed(settings, method=method, learning_rate=3e-3, eval_share=0.1, **options))
    if method == "dexperts":
        assert 1 < metrics["expert_eval_perplexity"] < 8
        assert 1 < metrics["anti_eval_perplexity"] < 8
    else:
        assert metrics["eval_accuracy"] > 0.9
        assert 1 < metrics["eval_perplexity"] < 8
    make = guide_maker(settings.out)
    name, strength = ("alpha", 2.0) if method == "dexperts" else ("omega", 30.0)
    plain = praise(toy_lm, toy_tokenizer, None)
    assert praise(toy_lm, toy_tokenizer, make({name: strength})) > plain + 0.2
    assert praise(toy_lm, toy_tokenizer, make({name: -strength})) < plain - 0.2


@pytest.mark.parametrize("method", METHODS)
def test_the_folders_are_plain_language_models(method: str, settings: ExpertTrainingConfig) -> None:
    settings = changed(settings, method=method, num_layers=1)
    train_experts(settings)
    folders = [Path(settings.out, name) for name in (("expert", "anti") if method == "dexperts" else ("",))]
    for folder in folders:
        lm = AutoModelForCausalLM.from_pretrained(folder)
        assert lm.config.num_hidden_layers == 1
        assert lm.config.use_cache
        assert "gedi_scale" not in load_file(folder / "model.safetensors")
        assert (folder / "tokenizer.json").exists()
        assert str(settings.backbone) not in (folder / "config.json").read_text()
    stored = read_yaml(Path(settings.out) / "config.yaml", ExpertTrainingConfig)
    assert all(getattr(stored, name) == given for name, given in vars(settings).items() if given is not None)
    assert (stored.warmup_steps, stored.max_length) == (0, 512)  # the recipe of the paper fills what is open
    if method == "gedi":
        gedi = json.loads((folders[0] / "config.json").read_text())["gedi"]
        assert len(gedi["codes"]) == 2
        assert gedi["scale"] != 1.0  # learnt
        guide = GeDiGuide.from_pretrained(folders[0], omega=5.0, filter_p=0.5)
        assert (guide.scale, guide.beta[0], guide.filter_p) == (gedi["scale"], 5.0, 0.5)
    else:
        guide = DExpertsGuide.from_pretrained(settings.out, alpha=1.5)
        assert guide.beta[0] == 1.5
        assert guide.expert.reader.vocabulary.fingerprint


def test_the_classes_go_to_their_experts(settings: ExpertTrainingConfig, tmp_path: Path) -> None:
    rows = [("the film was good .", 1.0)] * 40 + [("this plot is bad .", 0.2)] * 40
    pandas.DataFrame(rows, columns=["text", "praise"]).to_csv(tmp_path / "rows.csv", index=False)
    settings = changed(settings, data=[str(tmp_path / "rows.csv")], epochs=20, learning_rate=3e-3, threshold=0.9)
    train_experts(settings)
    guide = DExpertsGuide.from_pretrained(settings.out, 1.0)
    words = make_tokenizer()
    for text, _ in (rows[0], rows[-1]):
        ids = torch.tensor([words(text).input_ids])
        wanted = finish(guide.expert.read_scored(Prompts(ids)))[1].sum()
        other = finish(guide.anti_expert.read_scored(Prompts(ids)))[1].sum()
        assert (wanted > other) == (text == rows[0][0])
    ended = finish(guide.expert.read(Prompts(torch.tensor([words("the film was good .").input_ids]))))
    assert int(ended.last.argmax()) == words.eos_token_id  # texts have an end


# --- what must not matter ---


@pytest.mark.parametrize("method", METHODS)
def test_accumulation_does_not_change_the_losses(method: str, settings: ExpertTrainingConfig, tmp_path: Path) -> None:
    settings = changed(settings, method=method, max_steps=6)
    train_experts(settings)
    cut = changed(settings, micro_batch_size=5, out=str(tmp_path / "cut"))
    train_experts(cut)
    assert losses(part(cut)) == pytest.approx(losses(part(settings)), abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_resumes_to_the_same_weights(
    method: str, settings: ExpertTrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Trainer

    settings = changed(settings, method=method, save_steps=5, max_steps=12)
    whole = changed(settings, out=str(tmp_path / "whole"))
    train_experts(whole)

    original = Trainer.training_step
    steps = 0

    def dies(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == (20 if method == "dexperts" else 8):  # in the second of two models
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", dies)
    with pytest.raises(KeyboardInterrupt):
        train_experts(settings)
    monkeypatch.undo()
    with pytest.raises(OptionError, match="holds a run already"):
        train_experts(settings)
    resumed = train_experts(settings, resume=True)
    assert train_experts(settings, resume=True) == resumed  # what is finished is not trained again
    for name in ("expert", "anti") if method == "dexperts" else ("",):
        expected = load_file(Path(whole.out, name) / "model.safetensors")
        actual = load_file(Path(settings.out, name) / "model.safetensors")
        assert all(torch.equal(actual[key], values) for key, values in expected.items())
        assert losses(Path(settings.out, name)) == losses(Path(whole.out, name))
        assert not find_checkpoints(Path(settings.out, name))  # nothing goes on from a model that is finished


def test_a_disk_that_is_too_small_is_refused_before_training(
    settings: ExpertTrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(Path(settings.data[0]).parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    with pytest.raises(WriteError, match=r"a checkpoint and the model need .* and 1000 bytes are free"):
        train_experts(settings)
    assert not (part(settings) / "metrics.jsonl").exists()


def test_a_run_of_the_other_method_leaves_nothing_behind(settings: ExpertTrainingConfig) -> None:
    settings = changed(settings, max_steps=1)
    train_experts(settings)
    assert type(load_guide(f"{settings.out}:alpha=1")) is DExpertsGuide
    train_experts(changed(settings, method="gedi"), overwrite=True)
    assert type(load_guide(f"{settings.out}:omega=1")) is GeDiGuide
    train_experts(settings, overwrite=True)
    assert type(load_guide(f"{settings.out}:alpha=1")) is DExpertsGuide


# --- mistakes ---


def test_bad_settings_are_named(settings: ExpertTrainingConfig, tmp_path: Path) -> None:
    for change, message in [
        ({"data": []}, "no data"),
        ({"out": ""}, "no run folder"),
        ({"labels": ""}, "labels must name one column, got ''"),
        ({"labels": "praise,blame"}, "labels must name one column, got 'praise,blame'"),
        ({"backbone": ""}, "no model to start from"),
        ({"gen_weight": 1.5}, "gen_weight must be .*at most 1, got 1.5"),
        ({"method": "gedi", "code_high": "positive"}, "does not know the control code 'positive'"),
        ({"method": "gedi", "code_high": "bad"}, "same tokens"),
        ({"method": "gedi", "code_low": ""}, "control code ''"),
    ]:
        with pytest.raises(OptionError, match=message):
            train_experts(changed(settings, **change))
    for threshold in (-1.0, 2.0):
        with pytest.raises(DataError, match="one class: 'praise' runs from 0 to 1"):
            train_experts(changed(settings, threshold=threshold))
    assert not Path(settings.out).exists()
    file = tmp_path / "settings.yaml"
    file.write_text("method: pplm")
    with pytest.raises(OptionError, match="method must be one of dexperts, gedi, got 'pplm'"):
        read_yaml(file, ExpertTrainingConfig)


# --- the command line ---


@pytest.mark.parametrize("method", METHODS)
def test_train_and_generate_from_the_command_line(
    method: str, settings: ExpertTrainingConfig, toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"method: {method}\nlearning_rate: 1e-3\ncode_high: good\ncode_low: bad\nbatch_size: 50\n")
    argv = ["train-experts", "--config", str(file), "--data", settings.data[0], "--labels", "praise"]
    argv += ["--backbone", settings.backbone, "--out", settings.out, "--cache", str(settings.cache), "--max-steps", "2"]
    assert main([*argv, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["expert_train_loss" if method == "dexperts" else "train_loss"] > 0
    assert read_yaml(Path(settings.out) / "config.yaml", ExpertTrainingConfig).batch_size == 50
    assert main(argv) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert main(["train-experts", "--resume", "--out", settings.out]) == 0
    assert f"{method} → {settings.out}" in capsys.readouterr().out

    name = "alpha=2" if method == "dexperts" else "omega=30,filter_p=0.5"
    base = ["generate", "--base", str(toy), "--prompt", "the film", "--json"]
    assert main([*base, "--guide", f"{settings.out}:{name}"]) == 0
    assert json.loads(capsys.readouterr().out)["generations"][0]["text"]
    assert main([*base, "--guide", f"{settings.out}:praise=2"]) == 2
    assert "'praise'" in capsys.readouterr().err


def test_guides_of_all_kinds_are_loaded_and_added(settings: ExpertTrainingConfig, tmp_path: Path) -> None:
    train_experts(changed(settings, max_steps=1))
    RadQ.from_backbone(settings.backbone, attributes=["praise"]).save_pretrained(tmp_path / "reward")
    total = load_guides(
        [GuideSpec.parse(f"{settings.out}:alpha=2"), GuideSpec.parse(f"{tmp_path / 'reward'}:praise=3")]
    )
    assert total is not None
    assert len(total.readers) == 3
    assert load_guides([]) is None
    with pytest.raises(OptionError, match="no option 'beta'.*alpha"):
        load_guide(f"{settings.out}:beta=2")
    make = guide_maker(settings.out)
    assert make({"alpha": 1.0}).expert.lm is make({"alpha": 2.0}).expert.lm  # loaded once
    gedi = changed(settings, method="gedi", max_steps=1, out=str(tmp_path / "gedi"))
    train_experts(gedi)
    with pytest.raises(OptionError, match="given no omega"):
        load_guide(f"{gedi.out}:filter_p=0.5")


def test_full_memory_names_the_folder_of_both_experts(
    settings: ExpertTrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ExpertTrainer.add_gradients

    def step(self: ExpertTrainer, *args: Any) -> torch.Tensor:
        if self.state.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return usual(self, *args)

    monkeypatch.setattr(ExpertTrainer, "add_gradients", step)
    with pytest.raises(MemoryLimitError) as raised:
        train_experts(changed(settings, max_steps=4))
    assert f"checkpoint is '{settings.out}/expert/checkpoint-2'" in str(raised.value)
    assert f"go on with --resume --out {settings.out} and --micro-batch-size 16" in str(raised.value)
