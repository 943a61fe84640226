"""Models on the hub: every kind is uploaded with a card and loads again by its name, from a hub on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hub_server import COMMIT, Hub, serve_hub
from training_runs import changed

import radq
from radq.errors import ModelError, OptionError
from radq.models.calibration import read_calibrations
from radq.models.kinds import RadQ, RadV
from radq.models.reward import RewardModel
from radq.sources.embedded import reward_folder
from radq.training.config import RewardTrainingConfig
from radq.training.outcome import push_to_hub, write_card

TOKEN = "hf_secret"
PROGRAM = """
import json, sys, warnings
import torch
warnings.simplefilter("ignore")
from radq import RadqError, RewardModel, push_to_hub

for folder, name, backbone, token in json.loads(sys.argv[1]):
    try:
        address = push_to_hub(folder, name, license="apache-2.0", token=token)
    except RadqError as error:
        print(json.dumps(str(error)))
        continue
    model = RewardModel.from_pretrained(name, **({"backbone": backbone} if backbone else {}))
    rewards = model.token_rewards(torch.tensor([[3, 4, 5]])).flatten().tolist()
    print(json.dumps([address, type(model).__name__, model.tokenizer is not None, rewards]))
"""


def publish(hub: Hub, home: Path, jobs: list[tuple[str, ...]]) -> tuple[list[Any], str]:
    """Upload folders and load them by their names, in a process that knows this hub alone; also returns its output."""
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(jobs)]
    found = subprocess.run(
        command, env=os.environ | own | {"NO_PROXY": "*"}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()], found.stdout + found.stderr


def make(kind: str, toy: Path) -> RewardModel:
    if kind == "readout":
        return RadQ.from_base(str(toy), ["praise"])
    model = (RadV if kind == "v" else RadQ).from_backbone(toy, ["praise"])
    if kind == "lora":
        model.add_lora(2, str(toy))
    return model


@pytest.mark.slow
def test_every_kind_is_uploaded_and_loads_by_its_name(toy: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = {kind: make(kind, toy) for kind in ("q", "v", "lora", "readout")}
    jobs = []
    for kind, model in models.items():
        folder = tmp_path / kind
        model.save_pretrained(folder)
        (folder / "checkpoint-1").mkdir()
        (folder / "checkpoint-1" / "model.safetensors").touch()
        jobs.append((str(folder), f"me/{kind}", str(toy) if kind in ("lora", "readout") else "", TOKEN))
    with serve_hub(TOKEN) as hub:
        (*found, refused), output = publish(hub, tmp_path / "home", [*jobs, (*jobs[0][:3], "hf_wrong")])
    for (kind, model), (address, name, has_tokenizer, rewards) in zip(models.items(), found, strict=True):
        assert address == f"{hub.address}/me/{kind}/commit/{COMMIT}"
        assert (name, has_tokenizer) == (type(model).__name__, True)
        with torch.no_grad():
            expected = model.token_rewards(torch.tensor([[3, 4, 5]])).flatten().tolist()
        assert rewards == pytest.approx(expected, abs=1e-6)
        files = hub.repositories[f"me/{kind}"]
        assert {"README.md", "config.json", "tokenizer.json"} <= set(files)
        assert not [name for name in files if "checkpoint" in name]
        assert yaml.safe_load(files["README.md"].decode().split("---")[1])["license"] == "apache-2.0"
        assert TOKEN not in str(files)
    assert "'me/q' cannot be written on the hub" in refused
    assert not {TOKEN, "hf_wrong", "Traceback"} & set(output.replace('"', " ").split())
    assert "hf_wrong" not in output


def test_the_card_is_filled_from_the_run(settings: RewardTrainingConfig) -> None:
    metrics = radq.train(changed(settings, eval_share=0.2))
    card = write_card(settings.out, "me/praise", "mit")
    header: dict[str, Any] = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "radq"
    assert header["license"] == "mit"
    assert f"| weighted_mse | {metrics['eval_weighted_mse']:.4g} |" in card
    assert f"| constant_weighted_mse | {metrics['eval_constant_weighted_mse']:.4g} |" in card
    assert "Data: reviews.csv." in card
    assert "Label 'praise': numbers from 0 to 1 stay as they are." in card
    assert "| learning_rate | 0.001 |" in card
    assert "trained from toy" in card
    assert 'RewardModel.from_pretrained("me/praise")' in card
    assert str(Path(settings.data[0]).parent) not in card  # no paths of this machine
    assert settings.backbone not in card


def test_the_card_has_measured_strengths() -> None:
    card = write_card(reward_folder("sentiment"), "me/sentiment")
    (calibration, *_) = read_calibrations(reward_folder("sentiment"))
    assert f"| sentiment | {calibration.base} | {calibration.judge} | 1 | {calibration.table[-1].beta:.3g} |" in card


def test_the_card_of_a_model_without_a_run_says_less(toy: Path, tmp_path: Path) -> None:
    make("v", toy).save_pretrained(tmp_path / "model")
    card = write_card(tmp_path / "model", "me/praise")
    assert "RAD-V" in card
    assert "## Training" not in card
    assert "No texts were held out" in card
    assert "No licence is stated" in card


def test_what_cannot_be_uploaded_is_refused(toy: Path, tmp_path: Path) -> None:
    make("lora", toy).save_pretrained(tmp_path / "lora")
    with pytest.raises(OptionError, match="OWNER/NAME"):
        push_to_hub(tmp_path / "lora", "praise")
    with pytest.raises(ModelError, match="there is no folder"):
        push_to_hub(tmp_path / "none", "me/praise")
    with pytest.raises(ModelError, match="not a reward model"):
        push_to_hub(toy, "me/praise")
    with pytest.warns(UserWarning, match="backbone 'toy.*' of this model is a folder"), pytest.raises(radq.RadqError):
        push_to_hub(tmp_path / "lora", "me/praise")  # offline
