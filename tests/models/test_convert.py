"""Checkpoints as the public code writes them, made here from its published layout, become models with equal rewards."""

import pickle
from pathlib import Path

import pytest
import torch
from families import BOS, VOCAB, make_lm
from public_checkpoints import PublicRad, PublicRadQ, RunsCode, config_folder
from safetensors.torch import save_file
from torch import Tensor, nn

from radq.errors import CheckpointError, ModelError, OptionError
from radq.models.convert import JIGSAW, convert
from radq.models.kinds import RadQ, RadV
from radq.models.reward import RewardModel
from radq.training.losses import cross_entropy_loss, squared_loss

FAMILIES = ["gpt2", "llama"]


def random_ids() -> Tensor:
    return torch.randint(3, VOCAB, (4, 9), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("outputs", [1, 2, 7])
@torch.no_grad()
def test_rad(family: str, outputs: int, tmp_path: Path) -> None:
    public = PublicRad(family, outputs)
    torch.save(public.state_dict(), tmp_path / "pytorch_model.bin")
    model = convert(tmp_path, config_folder(family, tmp_path / "backbone"))
    assert isinstance(model, RadV)
    assert not model.config.prepend_bos
    ids = random_ids()
    torch.testing.assert_close(model.token_rewards(ids), public.rewards(ids), atol=1e-5, rtol=1e-5)
    if outputs == 7:
        assert model.config.attributes == list(JIGSAW)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("baseline", [True, False])
@pytest.mark.parametrize("wrapper", ["", "module.", "student_model."])
@torch.no_grad()
def test_rad_q(family: str, baseline: bool, wrapper: str, tmp_path: Path) -> None:
    public = PublicRadQ(family, 7, baseline)
    state = {wrapper + key: value for key, value in public.state_dict().items()}
    if wrapper == "student_model.":
        state |= {f"teacher_model.{key}": value for key, value in PublicRad(family, 7).state_dict().items()}
    torch.save(state, tmp_path / "weights.pt")
    model = convert(tmp_path / "weights.pt", config_folder(family, tmp_path / "backbone"))
    assert isinstance(model, RadQ)
    assert model.config.prepend_bos
    assert model.config.head == ("linear" if baseline else "linear-nobaseline")
    assert model.config.attributes == list(JIGSAW)
    ids = random_ids()
    with_bos = torch.cat([torch.full((4, 1), BOS), ids], dim=1)
    expected = public.rewards(with_bos)
    torch.testing.assert_close(model.token_rewards(ids), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.token_rewards(with_bos)[:, 1:], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_losses_equal_the_public_ones(tmp_path: Path) -> None:
    public = PublicRadQ("gpt2", 2)
    torch.save(public.state_dict(), tmp_path / "weights.pt")
    model = convert(tmp_path / "weights.pt", config_folder("gpt2", tmp_path / "backbone"))
    ids = random_ids()
    lengths = [9, 4, 1, 6]
    responses = torch.rand(4, 2)
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in lengths])
    squared, entropy = [], []
    for row, n in enumerate(lengths):  # a loop over utterances and positions, as the papers write it
        rewards = public.rewards(torch.cat([torch.tensor([BOS]), ids[row, :n]])[None])[0]
        for t in range(n):
            weight = 2 * (t + 1) / (n * (n + 1))
            squared.append(weight * ((rewards[t] - responses[row]) ** 2).sum())
            p = rewards[t].sigmoid()
            entropy.append(-weight * (responses[row] * p.log() + (1 - responses[row]) * (1 - p).log()).sum())
    outputs = model(ids, mask).rewards
    torch.testing.assert_close(squared_loss(outputs, mask, responses), torch.stack(squared).sum() / 4)
    torch.testing.assert_close(cross_entropy_loss(outputs, mask, responses), torch.stack(entropy).sum() / 4)


@torch.no_grad()
def test_constants_of_older_checkpoints_are_left_out(tmp_path: Path) -> None:
    public = PublicRad("gpt2", 1)
    state = public.state_dict()
    state["model.transformer.h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    state["model.transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(state, tmp_path / "weights.pt")
    model = convert(tmp_path / "weights.pt", config_folder("gpt2", tmp_path / "backbone"), ["sentiment"])
    assert model.config.attributes == ["sentiment"]
    torch.testing.assert_close(model.token_rewards(random_ids()), public.rewards(random_ids()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_safetensors_leave_a_tied_output_layer_out(family: str, tmp_path: Path) -> None:
    public = PublicRadQ(family, 1)
    state = public.state_dict()
    if family == "gpt2":
        del state["model.lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    model = convert(tmp_path, config_folder(family, tmp_path / "backbone"))
    assert isinstance(model, RadQ)
    assert (model.output_embedding is None) == (family == "gpt2")
    with_bos = torch.cat([torch.full((4, 1), BOS), random_ids()], dim=1)
    torch.testing.assert_close(model.token_rewards(random_ids()), public.rewards(with_bos), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_embeddings_that_differ_are_kept_apart(tmp_path: Path) -> None:
    public = PublicRadQ("gpt2", 1)
    public.model.lm_head.weight = nn.Parameter(torch.randn_like(public.model.lm_head.weight))
    torch.save(public.state_dict(), tmp_path / "weights.pt")
    model = convert(tmp_path / "weights.pt", config_folder("gpt2", tmp_path / "backbone"))
    with_bos = torch.cat([torch.full((4, 1), BOS), random_ids()], dim=1)
    expected = public.rewards(with_bos)
    torch.testing.assert_close(model.token_rewards(random_ids()), expected, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(
        RewardModel.from_pretrained(tmp_path / "out").token_rewards(random_ids()), model.token_rewards(random_ids())
    )


@torch.no_grad()
def test_sharded_checkpoints(tmp_path: Path) -> None:
    import json

    public = PublicRad("llama", 1)
    names = list(public.state_dict())
    halves = {"pytorch_model-1.bin": names[:9], "pytorch_model-2.bin": names[9:]}
    for file, keys in halves.items():
        torch.save({key: public.state_dict()[key] for key in keys}, tmp_path / file)
    index = {"weight_map": {key: file for file, keys in halves.items() for key in keys}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    model = convert(tmp_path, config_folder("llama", tmp_path / "backbone"))
    torch.testing.assert_close(model.token_rewards(random_ids()), public.rewards(random_ids()), atol=1e-5, rtol=1e-5)


def test_options(tmp_path: Path) -> None:
    torch.save(PublicRad("llama", 2).state_dict(), tmp_path / "weights.pt")
    backbone = config_folder("llama", tmp_path / "backbone")
    model = convert(tmp_path / "weights.pt", backbone, loss="ce", prepend_bos=True)
    assert model.config.loss == "ce"
    assert model.config.prepend_bos
    assert model.config.attributes == ["reward_1", "reward_2"]
    with pytest.raises(OptionError, match="2 different names"):
        convert(tmp_path / "weights.pt", backbone, ["one"])


# --- checkpoints that cannot be read ---


def test_a_pickle_with_code_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model.lm_head.weight": RunsCode()}, tmp_path / "weights.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(RunsCode()))
    for file in ("weights.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match=rf"{file}.*run code"):
            convert(tmp_path / file, config_folder("gpt2", tmp_path / "backbone"))
    assert not (tmp_path / "was-run").exists()


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    backbone = config_folder("gpt2", tmp_path / "backbone")
    torch.save(PublicRad("gpt2", 1).state_dict(), tmp_path / "weights.pt")
    (tmp_path / "weights.pt").write_bytes((tmp_path / "weights.pt").read_bytes()[:2000])
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 7)
    for file in ("weights.pt", "empty.pt", "model.safetensors"):
        with pytest.raises(CheckpointError, match="damaged"):
            convert(tmp_path / file, backbone)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="no state dict"):
        convert(tmp_path / "list.pt", backbone)


def test_unknown_layouts(tmp_path: Path) -> None:
    backbone = config_folder("gpt2", tmp_path / "backbone")
    torch.save(make_lm("gpt2").state_dict(), tmp_path / "lm.pt")
    with pytest.raises(CheckpointError, match="layout is unknown"):
        convert(tmp_path / "lm.pt", backbone)
    mlp = PublicRadQ("gpt2", 1).state_dict() | {"head.w1.weight": torch.zeros(2, 2)}
    torch.save(mlp, tmp_path / "mlp.pt")
    with pytest.raises(CheckpointError, match="non-linearity"):
        convert(tmp_path / "mlp.pt", backbone)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        convert(tmp_path / "nothing.pt", backbone)


def test_a_backbone_that_does_not_fit(tmp_path: Path) -> None:
    state = PublicRad("gpt2", 1).state_dict()
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="lacks the tensor"):
        convert(tmp_path / "weights.pt", config_folder("llama", tmp_path / "llama"))
    other = make_lm("gpt2").config
    other.vocab_size = 50
    other.save_pretrained(tmp_path / "wide")
    with pytest.raises(CheckpointError, match="does not fit"):
        convert(tmp_path / "weights.pt", tmp_path / "wide")
    torch.save(state | {"model.transformer.h.7.ln_1.weight": torch.ones(16)}, tmp_path / "deep.pt")
    with pytest.raises(CheckpointError, match=r"h\.7"):
        convert(tmp_path / "deep.pt", config_folder("gpt2", tmp_path / "backbone"))
    with pytest.raises(ModelError, match="nowhere"):
        convert(tmp_path / "weights.pt", tmp_path / "nowhere")
