"""Training on rows that a program holds, and on chats: the same run as on a file."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from training_runs import SMALL, changed, weights

import radq
from radq.cli import main
from radq.errors import OptionError
from radq.models.reward import RewardModel
from radq.toy import make_reviews
from radq.training.config import ExpertTrainingConfig, RewardTrainingConfig

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


def test_rows_of_a_program_train_as_a_file_does(settings: RewardTrainingConfig, tmp_path: Path) -> None:
    radq.train(settings)
    rows = pandas.read_csv(settings.data[0])
    own = changed(settings, data=[], out=str(tmp_path / "own"))

    def stream() -> Iterator[dict[str, Any]]:
        yield from rows.to_dict("records")

    radq.train(own, data=stream(), eval_data=rows[:20])
    expected, found = weights(settings.out), weights(own.out)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert main(["train", "--resume", "--out", own.out, "--json"]) == 0  # which finds the rows in the cache
    radq.train(own, resume=True, data=rows, eval_data=rows[:20])
    with pytest.raises(OptionError, match="the contents of data changed"):
        radq.train(own, resume=True, data=rows[1:], eval_data=rows[:20])


def test_settings_are_checked_before_rows_are_read(settings: RewardTrainingConfig) -> None:
    def stream() -> Iterator[dict[str, Any]]:
        raise AssertionError("nothing may be read")
        yield {}

    with pytest.raises(OptionError, match="no run folder"):
        radq.train(changed(settings, data=[], out=""), data=stream())
    with pytest.raises(OptionError, match="there is no data"):
        radq.train(changed(settings, data=[]))


def test_experts_train_on_rows(calm_toy: Path, tmp_path: Path) -> None:
    config = ExpertTrainingConfig(
        labels="praise", backbone=str(calm_toy), out=str(tmp_path / "run"), cache=str(tmp_path / "cache"), **SMALL
    )
    rows = [{"text": text, "praise": praise} for text, praise in make_reviews(60)]
    metrics = radq.train_experts(config, data=rows)
    assert metrics["expert_train_loss"] > 0
    assert (tmp_path / "run" / "anti" / "config.json").is_file()


def test_chats_train_and_score(calm_toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backbone = tmp_path / "chat-toy"
    shutil.copytree(calm_toy, backbone)
    (backbone / "chat_template.jinja").write_text(TEMPLATE)
    file = tmp_path / "chats.jsonl"
    with file.open("w") as stream:
        for text, praise in make_reviews(60):
            messages = [{"role": "user", "content": "the film"}, {"role": "assistant", "content": text}]
            stream.write(json.dumps({"messages": messages, "praise": praise}) + "\n")
    out = str(tmp_path / "run")
    options = ["--epochs", "1", "--cache", str(tmp_path / "cache"), "--labels", "praise", "--json"]
    train = ["train", "--data", str(file), "--text", "messages", "--backbone", str(backbone), "--out", out]
    assert main([*train, *options]) == 0
    assert json.loads(capsys.readouterr().out)["train_loss"] > 0
    model = RewardModel.from_pretrained(out)
    assert model.tokenizer is not None
    assert model.tokenizer.chat_template == TEMPLATE
    assert main(["score", "--reward", out, "--data", str(file), "--text", "messages", "--json"]) == 0
    scored = [json.loads(line) for line in (tmp_path / "chats.scored.jsonl").read_text().splitlines()]
    parts = ["user the film assistant", f" {scored[0]['messages'][1]['content']}"]
    tokens = [token for part in parts for token in model.tokenizer(part, add_special_tokens=False).input_ids]
    ids = torch.tensor([tokens])
    expected = model.token_rewards(ids, torch.ones_like(ids))[0, -1, 0].item()
    assert scored[0]["reward_praise"] == pytest.approx(expected, abs=1e-5)
