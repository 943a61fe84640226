"""Readouts in vLLM: rewards from the states of the logits, and refusals of states that are not theirs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm_world import PROMPTS, TOKENIZER, World, make_readout

from radq.decoding.config import Steering
from radq.errors import DataError, ModelError, OptionError
from radq.guides.reward import RewardGuide
from radq.guides.spec import load_guide
from radq.hosts import base_states
from radq.hosts.base_states import WANTED, ShownFollower, reads_shown, show_layers, take_states
from radq.hosts.follower import HostRequest
from radq.numerics import pad_left
from radq.registry.strengths import Guidance


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World("llama", tmp_path_factory.mktemp("last"))


class VllmModel(nn.Module):
    """Stands for a model of vLLM that gives the outputs of the layers that it is told."""

    def __init__(self, config: Any):
        super().__init__()
        self.config, self.model = config, SimpleNamespace(aux_hidden_state_layers=())

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.model.aux_hidden_state_layers = layers

    def forward(self, states: dict[int, Tensor]) -> Any:
        earlier = [states[layer] for layer in self.model.aux_hidden_state_layers]
        return (states[2], earlier) if earlier else states[2]


class LogitsLayer:
    """Stands for vLLM's layer that computes logits."""

    def forward(self, lm_head: Any, hidden_states: Tensor) -> Tensor:
        return hidden_states @ lm_head.weight


@pytest.fixture
def vllm_model(monkeypatch: pytest.MonkeyPatch) -> type[VllmModel]:
    """A class of models in a vLLM that is not installed."""
    kind = type("Model", (VllmModel,), {})
    modules = {
        "vllm.model_executor.model_loader.utils": SimpleNamespace(get_model_cls=lambda config: kind),
        "vllm.model_executor.layers.logits_processor": SimpleNamespace(LogitsProcessor=type("L", (LogitsLayer,), {})),
    }
    monkeypatch.setattr(base_states, "require_package", lambda name, extra: modules[name])
    monkeypatch.delitem(base_states._KEPT, "states", raising=False)
    return kind


def make_config(base: Path, **changes: Any) -> Any:
    """The part of vLLM's configuration that is looked at."""
    settings = {"quantization": None, "lora": None, "sharded": False, "pipeline": 1, "drafts": None} | changes
    parallel = {"enable_batch_sharded_sampling": settings["sharded"], "pipeline_parallel_size": settings["pipeline"]}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(base), quantization=settings["quantization"], hf_config=SimpleNamespace()
        ),
        lora_config=settings["lora"],
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=settings["drafts"] and SimpleNamespace(method=settings["drafts"]),
        additional_config={},
    )


@torch.no_grad()
def test_rewards_are_those_of_readouts_that_read_the_texts_themselves(
    world: World, vllm_model: type[VllmModel]
) -> None:
    """The way of the states: model, rows that are sampled, logits, guide."""
    guides = [load_guide(world.guides[name]) for name in ("q", "last", "layers")]
    config = make_config(world.base)
    shown = show_layers(guides, config)
    assert shown == (2, 1)
    assert [reads_shown(guide, shown) for guide in guides] == [False, True, True]
    assert not reads_shown(guides[2], (2,))
    assert config.additional_config == {WANTED: [1]}  # for what vLLM compiles
    texts = [TOKENIZER(prompt).input_ids for prompt in PROMPTS]
    outputs = [world.lm(torch.tensor([text]), output_hidden_states=True) for text in texts]
    states = {layer: torch.cat([one.hidden_states[layer][:, -1] for one in outputs]) for layer in (1, 2)}
    wide = vllm_model(config.model_config.hf_config)(states)
    weight = world.lm.lm_head.weight.T
    layer = base_states.require_package("vllm.model_executor.layers.logits_processor", "vllm").LogitsProcessor()
    head = SimpleNamespace(weight=weight, embedding_dim=len(weight))
    logits = layer.forward(head, wide)
    torch.testing.assert_close(logits, torch.cat([one.logits[:, -1] for one in outputs]))
    candidates = torch.randint(3, 30, (3, 6), generator=torch.Generator().manual_seed(0))
    beta, rows = torch.tensor([[2.0, -1.0], [0.0, 3.0], [-4.0, 0.5]]), torch.tensor([3, 0, 2])
    for guide in guides[1:]:
        follower = ShownFollower(guide, 8, 64, torch.device("cpu"), shown)
        found = follower.advise(rows, candidates, beta)
        expected = guide.advise(guide.start(*pad_left([texts[row] for row in rows])), candidates, beta)
        torch.testing.assert_close(found.shift, expected.shift)
        assert found.shift.abs().max() > 0.1
        assert follower.plan_bytes() == follower.nbytes == 0
    layer.forward(head, states[2])
    for guide in guides[1:]:
        with pytest.raises(DataError, match="shown 1 layers, not 2"):
            ShownFollower(guide, 8, 64, torch.device("cpu"), shown).advise(rows, candidates, beta)
    other = vllm_model(SimpleNamespace())  # of another engine in this process
    assert other(states) is states[2]


@pytest.mark.parametrize(
    "changes", [{"quantization": "fp8"}, {"lora": "config"}, {"sharded": True}, {"pipeline": 2}, {"drafts": "eagle3"}]
)
def test_readouts_of_more_layers_read_themselves_where_states_are_not_theirs(
    changes: dict[str, Any], world: World, vllm_model: type[VllmModel]
) -> None:
    guides = [load_guide(world.guides["layers"])]
    assert show_layers(guides, make_config(world.base, drafts="ngram_gpu")) == (2, 1)
    assert show_layers(guides, make_config(world.base, **changes)) == ()


def test_rows_are_those_of_the_latest_step(world: World) -> None:
    follower = ShownFollower(load_guide(world.guides["last"]), 8, 64, torch.device("cpu"), (2,))
    one, two = (HostRequest(Guidance({"last.0": 1.0}, Steering(5)), [5], []) for _ in range(2))
    follower.follow({one: 0, two: 3}, None, 1)
    layout = follower.layout
    follower.follow({one: 0, two: 3}, None, 1)
    assert follower.layout == layout  # what was made for these rows stays
    follower.follow({two: 0}, None, 1)
    assert (follower.rows, follower.layout > layout) == ({two: 0}, True)
    follower.retain([one])
    assert follower.rows == {}


def test_states_of_another_base_model_are_refused(world: World, tmp_path: Path, vllm_model: type[VllmModel]) -> None:
    guides = [load_guide(world.guides[name]) for name in ("q", "last")]
    assert show_layers(guides, make_config(world.base)) == (2,)
    half = tmp_path / "half"
    world.lm.to(torch.bfloat16).save_pretrained(half)
    world.lm.to(torch.float32)
    assert show_layers(guides, make_config(half)) == (2,)
    torch.manual_seed(1)
    other = World("llama", tmp_path / "other")
    with torch.no_grad():
        other.lm.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    other.lm.save_pretrained(other.base)
    with pytest.raises(ModelError, match="other weights"):
        show_layers(guides, make_config(other.base))
    assert show_layers(guides[:1], make_config(other.base)) == ()
    layers = load_guide(world.guides["layers"])
    assert show_layers([layers], make_config(other.base)) == ()  # it reads its own
    foreign = RewardGuide(make_readout(other.base, 2), {"nice": 1.0})
    assert show_layers([layers, guides[1], foreign], make_config(world.base)) == (2,)  # nor is it shown another's
    assert not reads_shown(foreign, (2,))


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"quantization": "fp8"}, "quantised"), ({"lora": "config"}, "LoRA"), ({"sharded": True}, "batch-sharded")],
)
def test_what_changes_states_or_rows_is_refused(changes: dict[str, Any], named: str, world: World) -> None:
    with pytest.raises(OptionError, match=named):
        show_layers([load_guide(world.guides["last"])], make_config(world.base, **changes))


def test_missing_states_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(base_states._KEPT, "states", raising=False)
    with pytest.raises(DataError, match="no hidden states"):
        take_states()
