"""Readouts of the last layer: rewards from the states of the logits, and refusals of states that are not theirs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_world import PROMPTS, TOKENIZER, World

from radq.decoding.config import Steering
from radq.errors import DataError, ModelError, OptionError
from radq.guides.spec import load_guide
from radq.hosts import last_layer
from radq.hosts.batching import Request
from radq.hosts.guidance import Guidance
from radq.hosts.last_layer import LastLayerFollower, check_last_layer, reads_last_layer, take_states
from radq.numerics import pad_left


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World("llama", tmp_path_factory.mktemp("last"))


def make_config(base: Path, **changes: Any) -> Any:
    """The part of vLLM's configuration that is looked at."""
    settings = {"quantization": None, "lora": None, "sharded": False} | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(base), quantization=settings["quantization"]),
        lora_config=settings["lora"],
        parallel_config=SimpleNamespace(enable_batch_sharded_sampling=settings["sharded"]),
    )


@torch.no_grad()
def test_rewards_are_those_of_a_readout_that_reads_the_texts_itself(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = load_guide(world.guides["last"])
    assert reads_last_layer(guide)
    assert not reads_last_layer(load_guide(world.guides["q"]))
    texts = [TOKENIZER(prompt).input_ids for prompt in PROMPTS]
    states = torch.cat([world.lm(torch.tensor([t]), output_hidden_states=True).hidden_states[-1][:, -1] for t in texts])
    monkeypatch.setitem(last_layer._KEPT, "states", states)
    candidates = torch.randint(3, 30, (3, 6), generator=torch.Generator().manual_seed(0))
    beta = torch.tensor([[2.0, -1.0], [0.0, 3.0], [-4.0, 0.5]])
    follower = LastLayerFollower(guide, 8, 64, torch.device("cpu"))
    rows = torch.tensor([3, 0, 2])
    found = follower.advise(rows, candidates, beta)
    expected = guide.advise(guide.start(*pad_left([texts[row] for row in rows])), candidates, beta)
    torch.testing.assert_close(found.shift, expected.shift)
    assert found.shift.abs().max() > 0.1
    assert follower.plan_bytes() == follower.nbytes == 0


def test_rows_are_those_of_the_latest_step(world: World) -> None:
    follower = LastLayerFollower(load_guide(world.guides["last"]), 8, 64, torch.device("cpu"))
    one, two = (Request(Guidance({"last.0": 1.0}, Steering(5)), [5], []) for _ in range(2))
    follower.follow({one: 0, two: 3}, None, 1)
    layout = follower.layout
    follower.follow({one: 0, two: 3}, None, 1)
    assert follower.layout == layout  # what was made for these rows stays
    follower.follow({two: 0}, None, 1)
    assert (follower.rows, follower.layout > layout) == ({two: 0}, True)
    follower.retain([one])
    assert follower.rows == {}


def test_states_of_another_base_model_are_refused(world: World, tmp_path: Path) -> None:
    guides = [load_guide(world.guides[name]) for name in ("q", "last")]
    check_last_layer(guides, make_config(world.base))
    half = tmp_path / "half"
    world.lm.to(torch.bfloat16).save_pretrained(half)
    world.lm.to(torch.float32)
    check_last_layer(guides, make_config(half))
    torch.manual_seed(1)
    other = World("llama", tmp_path / "other")
    with torch.no_grad():
        other.lm.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    other.lm.save_pretrained(other.base)
    with pytest.raises(ModelError, match="other weights"):
        check_last_layer(guides, make_config(other.base))
    check_last_layer(guides[:1], make_config(other.base))


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"quantization": "fp8"}, "quantised"), ({"lora": "config"}, "LoRA"), ({"sharded": True}, "batch-sharded")],
)
def test_what_changes_states_or_rows_is_refused(changes: dict[str, Any], named: str, world: World) -> None:
    with pytest.raises(OptionError, match=named):
        check_last_layer([load_guide(world.guides["last"])], make_config(world.base, **changes))


def test_missing_states_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(last_layer._KEPT, "states", raising=False)
    with pytest.raises(DataError, match="no hidden states"):
        take_states()
