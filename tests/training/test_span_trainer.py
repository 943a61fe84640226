"""Training on spans: the loss by hand, and models of both kinds that learn which words are good."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import SMALL, changed, losses, run_in_two_processes

import radq
from radq.cli import main
from radq.data.dataset import GlobalBatches, load_data
from radq.data.examples import DataColumns
from radq.errors import OptionError
from radq.models.reward import RewardModel
from radq.toy import BAD, GOOD, make_reviews
from radq.training.config import RewardTrainingConfig


def mark(text: str) -> list[list[int]]:
    """The spans of good and bad words of a text."""
    spans, start = [], 0
    for word in text.split(" "):
        if word in (*GOOD, *BAD):
            spans.append([start, start + len(word), int(word in GOOD)])
        start += len(word) + 1
    return spans


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "marked.jsonl"
    with file.open("w") as stream:
        for text, praise in make_reviews(300):
            stream.write(json.dumps({"text": text, "marks": mark(text), "praise": praise}) + "\n")
    return file


@pytest.fixture
def spans(marked: Path, calm_toy: Path, tmp_path: Path) -> RewardTrainingConfig:
    return RewardTrainingConfig(
        recipe="paper",
        data=[str(marked)],
        spans="marks",
        backbone=str(calm_toy),
        out=str(tmp_path / "run"),
        cache=str(tmp_path / "cache"),
        eval_share=0.2,
        **SMALL,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["q", "v"])
def test_both_kinds_learn_which_words_are_good(kind: Any, spans: RewardTrainingConfig) -> None:
    learning: dict[str, Any] = {"q": {"epochs": 4, "reg_weight": 0.1}, "v": {"epochs": 12}}[kind]
    metrics = radq.train(changed(spans, kind=kind, learning_rate=3e-3, batch_size=8, **learning))
    assert metrics["eval_auc_marks"] > 0.95
    assert metrics["eval_weighted_mse"] < metrics["eval_constant_weighted_mse"]
    model = RewardModel.from_pretrained(spans.out)
    assert model.config.attributes == ["marks"]
    assert model.tokenizer is not None
    ids = model.tokenizer("the film was", add_special_tokens=False, return_tensors="pt").input_ids
    words = [model.tokenizer(word, add_special_tokens=False).input_ids[0] for word in ("good", "bad")]
    good, bad = model.next_rewards(ids, torch.ones_like(ids), torch.tensor([words]))[0, :, 0].tolist()
    assert good > bad + 0.2


@pytest.mark.parametrize("loss", ["mse", "ce"])
def test_the_first_loss_is_the_mean_over_texts_of_the_mean_over_their_marked_tokens(
    loss: Any, spans: RewardTrainingConfig
) -> None:
    spans = changed(spans, loss=loss, kind="v", eval_share=0, micro_batch_size=5, max_steps=1)
    torch.manual_seed(spans.seed)
    model = radq.RadV.from_backbone(spans.backbone, ["marks"])
    data = load_data(spans.data, model.tokenizer, DataColumns(spans="marks"), 512, spans.cache)  # pyright: ignore
    rows = GlobalBatches(data.lengths, 16, seed=spans.seed).plan()[0]
    total = []
    for row in rows.tolist():
        batch = data.batch([row])
        outputs = model(batch["input_ids"], batch["attention_mask"]).rewards[0, :, 0].double().detach().numpy()
        marked = batch["loss_mask"][0].numpy() > 0
        labels = batch["token_labels"][0, :, 0].numpy()[marked]
        if not len(labels):
            continue
        found = outputs[marked]
        chance = 1 / (1 + np.exp(-found))
        entropy = -labels * np.log(chance) - (1 - labels) * np.log(1 - chance)
        total.append(((found - labels) ** 2 if loss == "mse" else entropy).mean())
    radq.train(spans)
    assert losses(spans.out)[0] == pytest.approx(np.mean(total), rel=1e-4)


@pytest.mark.slow
def test_two_processes_log_the_losses_of_one(spans: RewardTrainingConfig, tmp_path: Path) -> None:
    metrics = radq.train(changed(spans, kind="v", max_steps=4))
    other = changed(spans, kind="v", max_steps=4, out=str(tmp_path / "two"))

    def work() -> int:
        found = radq.train(other)
        return int(abs(found["eval_auc_marks"] - metrics["eval_auc_marks"]) > 1e-4)

    assert run_in_two_processes(work) == [0, 0]
    assert losses(other.out) == pytest.approx(losses(spans.out), rel=1e-4)


def test_on_the_command_line_beside_labels_of_texts(
    marked: Path, calm_toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    command = ["train", "--data", str(marked), "--spans", "marks", "--labels", "praise", "--backbone", str(calm_toy)]
    assert main([*command, "--out", out, "--cache", str(tmp_path / "cache"), "--epochs", "1"]) == 0
    shown = capsys.readouterr().out
    assert "spans on" in shown
    assert RewardModel.from_pretrained(out).config.attributes == ["praise"]
    assert main(["train", "--resume", "--out", out, "--json"]) == 0


@pytest.mark.parametrize(
    "settings", [{"pairs": "a,b", "labels": "x"}, {"teacher": "t"}, {"labels": "a,b"}, {"text": "marks"}], ids=str
)
def test_settings_that_contradict_spans_are_refused(settings: dict[str, Any], spans: RewardTrainingConfig) -> None:
    with pytest.raises(OptionError, match="spans"):
        changed(spans, **settings).check()
