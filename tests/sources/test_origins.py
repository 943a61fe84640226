"""LoRA reward models find their backbone again from any working directory, and refuse one with other weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_reward
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModel, PreTrainedTokenizerBase

from radq.errors import ModelError
from radq.models.kinds import RadQ
from radq.models.loading import load_causal_lm
from radq.models.reward import RewardModel
from radq.sources.hub import quiet
from radq.sources.model_source import ModelSource

IDS = torch.tensor([[5, 9, 3, 12]])


def make_adapted(backbone: Path | str, kind: str = "q", **options: Any) -> RewardModel:
    model = make_reward(kind, backbone, **options).float()
    model.add_lora(3, str(backbone))
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def change_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = sorted(weights)[0]
    weights[name] = weights[name] + 0.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def world(lm_folders: dict[str, Path], tmp_path: Path) -> Path:
    """A backbone and, beside it, a folder with a reward model that was trained over it by a relative path."""
    shutil.copytree(lm_folders["llama"], tmp_path / "world" / "lm")
    return tmp_path / "world"


def test_the_working_directory_does_not_matter(world: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(world)
    model = make_adapted("lm")
    model.save_pretrained("runs/praise")
    stored = json.loads(Path("runs/praise/config.json").read_text())
    assert stored["backbone_name"] == "../../lm"
    assert stored["backbone_fingerprint"] == ModelSource.find(Path("lm")).weights_fingerprint
    expected = model.token_rewards(IDS)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(RewardModel.from_pretrained(world / "runs/praise").token_rewards(IDS), expected)
    assert torch.equal(RewardModel.from_pretrained("world/runs/praise").token_rewards(IDS), expected)
    again = RewardModel.from_pretrained("world/runs/praise")
    again.save_pretrained("elsewhere")  # the relative path is that of the new folder
    assert json.loads(Path("elsewhere/config.json").read_text())["backbone_name"] == "../world/lm"
    assert torch.equal(RewardModel.from_pretrained("elsewhere").token_rewards(IDS), expected)


def test_model_and_backbone_move_together_or_end_up_side_by_side(world: Path, tmp_path: Path) -> None:
    model = make_adapted(world / "lm")
    model.save_pretrained(world / "runs" / "praise")
    world.rename(tmp_path / "moved")
    moved = RewardModel.from_pretrained(tmp_path / "moved" / "runs" / "praise")
    assert torch.equal(moved.token_rewards(IDS), model.token_rewards(IDS))
    (tmp_path / "moved" / "runs" / "praise").rename(tmp_path / "praise")
    with pytest.raises(ModelError, match=r"'\.\./\.\./lm' of this LoRA reward model does not exist.*beside"):
        RewardModel.from_pretrained(tmp_path / "praise")
    (tmp_path / "moved" / "lm").rename(tmp_path / "lm")
    assert torch.equal(RewardModel.from_pretrained(tmp_path / "praise").token_rewards(IDS), model.token_rewards(IDS))
    (tmp_path / "lm").rename(tmp_path / "renamed")
    given = RewardModel.from_pretrained(tmp_path / "praise", backbone=tmp_path / "renamed")
    assert torch.equal(given.token_rewards(IDS), model.token_rewards(IDS))


def test_errors_call_a_readout_a_readout(world: Path) -> None:
    RadQ.from_base(world / "lm", ["praise"]).save_pretrained(world / "praise")
    change_weights(world / "lm")
    with pytest.raises(ModelError, match="than the backbone that this readout was trained with"):
        RewardModel.from_pretrained(world / "praise")
    shutil.rmtree(world / "lm")
    with pytest.raises(ModelError, match="of this readout does not exist.*beside the readout"):
        RewardModel.from_pretrained(world / "praise")


def test_a_backbone_with_other_weights_is_refused(world: Path, lm_folders: dict[str, Path]) -> None:
    make_adapted(world / "lm").save_pretrained(world / "praise")
    change_weights(world / "lm")
    with pytest.raises(ModelError, match="other weights than the backbone"):
        RewardModel.from_pretrained(world / "praise")
    with pytest.raises(ModelError, match="other weights than the backbone"):
        RewardModel.from_pretrained(world / "praise", backbone=lm_folders["qwen3"])


def test_a_fingerprint_knows_numbers_not_files(world: Path) -> None:
    before = ModelSource.find(world / "lm").weights_fingerprint
    lm = load_causal_lm(world / "lm")
    with quiet():
        lm.save_pretrained(world / "sharded", max_shard_size="2KB")
    assert len(list((world / "sharded").glob("*.safetensors"))) > 1
    assert ModelSource.find(world / "sharded").weights_fingerprint == before
    change_weights(world / "lm")
    assert ModelSource.find(world / "lm").weights_fingerprint != before


def test_a_folder_of_an_earlier_version_loads(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in model.safetensors under the model's own names, the backbone by the path that was typed."""
    monkeypatch.chdir(world)
    model = make_adapted("lm")
    model.save_pretrained("praise")
    Path("praise/adapter_model.safetensors").unlink()
    weights = {
        name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name or name.startswith("head.")
    }
    save_file(weights, "praise/model.safetensors", metadata={"format": "pt"})
    config = json.loads(Path("praise/config.json").read_text())
    for name in ("backbone_revision", "backbone_fingerprint"):
        del config[name]
    Path("praise/config.json").write_text(json.dumps(config | {"backbone_name": "lm"}))
    assert torch.equal(RewardModel.from_pretrained("praise").token_rewards(IDS), model.token_rewards(IDS))


def put_into_hub_cache(folder: Path, name: str, cache: Path) -> str:
    """As huggingface_hub lays it down; returns the commit."""
    commit = (name.encode().hex() * 40)[:40]
    snapshot = cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    return commit


def test_model_and_backbone_from_the_hub(
    world: Path, toy_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = world / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    toy_tokenizer.save_pretrained(world / "lm")
    commit = put_into_hub_cache(world / "lm", "someone/lm", cache)
    options: dict[str, Any] = {"cache_dir": str(cache), "local_files_only": True}
    origin = ModelSource.find("someone/lm").origin
    assert (origin.name, origin.revision) == ("someone/lm", commit)
    assert origin.fingerprint == ModelSource.find(world / "lm").weights_fingerprint
    model = make_adapted("someone/lm")
    model.save_pretrained(world / "praise")
    put_into_hub_cache(world / "praise", "me/praise", cache)
    loaded = RewardModel.from_pretrained("me/praise", **options)
    assert torch.equal(loaded.token_rewards(IDS), model.token_rewards(IDS))
    assert loaded.config.backbone_name == "someone/lm"
    monkeypatch.chdir(world)
    shutil.copytree(world / "lm", world / "someone" / "lm")  # a folder that transformers would take instead
    change_weights(world / "someone" / "lm")
    with pytest.raises(ModelError, match="'someone/lm' holds other weights"):
        RewardModel.from_pretrained("me/praise", **options)


@pytest.mark.parametrize("num_layers", [None, 1])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@torch.no_grad()
def test_peft_loads_the_adapters(
    family: str, num_layers: int | None, lm_folders: dict[str, Path], tmp_path: Path
) -> None:
    model = make_adapted(lm_folders[family], num_layers=num_layers)
    model.save_pretrained(tmp_path / "praise")
    config = json.loads((tmp_path / "praise" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6)
    assert not Path(config["base_model_name_or_path"]).is_absolute()  # both folders can move together
    assert (tmp_path / "praise" / config["base_model_name_or_path"]).samefile(lm_folders[family])
    with quiet():
        backbone = AutoModel.from_pretrained(lm_folders[family])
    untrained = backbone(IDS).last_hidden_state
    adapted = PeftModel.from_pretrained(backbone, str(tmp_path / "praise")).eval()
    layers = backbone.h if family == "gpt2" else backbone.layers
    del layers[num_layers or 2 :]
    hidden = adapted(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(hidden, model.backbone(input_ids=IDS).last_hidden_state)
    assert (hidden - untrained).abs().max() > 0.1


def test_arguments_of_transformers_reach_the_backbone(world: Path) -> None:
    make_adapted(world / "lm").save_pretrained(world / "praise")
    model = RewardModel.from_pretrained(
        world / "praise", dtype=torch.float16, attn_implementation="eager", local_files_only=True, device_map="cpu"
    )
    assert model.backbone.config._attn_implementation == "eager"
    adapters = {name: parameter.dtype for name, parameter in model.named_parameters() if ".lora_" in name}
    assert set(adapters.values()) == {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if name not in adapters} == {torch.float16}
    assert isinstance(RewardModel.from_pretrained(world / "praise", torch_dtype="float32"), RadQ)
