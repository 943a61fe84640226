"""Readouts: rewards from the hidden states of the base model, by its own forward or by one beside it."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from baselines import make_guide
from families import BOS, FAMILIES, VOCAB, make_lm, make_number_tokenizer, make_readout
from instruments import CountKernels
from safetensors.torch import load_file

from radq import generate
from radq.decoding.config import Steering
from radq.decoding.decoder import Decoder
from radq.decoding.engine import Engine
from radq.decoding.request import Request
from radq.errors import ModelError, OptionError
from radq.guides.reward import RewardGuide
from radq.guides.spec import load_guide
from radq.hosts.transformers import GuidedLogitsProcessor
from radq.models.loading import find_backbone, load_causal_lm
from radq.models.readout import check_base, choose_readout, sketch_weights
from radq.models.reward import RewardModel
from radq.models.vocabulary import Vocabulary


@pytest.mark.parametrize("family", FAMILIES)
def test_rewards_are_those_of_the_formula(family: str, lm_folders: dict[str, Path]) -> None:
    model: Any = make_readout("q", lm_folders[family]).double()
    lm = make_lm(family).double()
    tokens = torch.randint(3, VOCAB, (2, 7))
    found = model.token_rewards(tokens)
    states = lm(input_ids=tokens, output_hidden_states=True).hidden_states
    readout: Any = model.readout
    for row in range(2):
        for t in range(7):
            hidden = readout.empty
            if t:
                parts = [states[layer][row, t - 1] for layer in readout.layers]
                joined = torch.cat([part / (part.square().mean() + 1e-6).sqrt() for part in parts])
                hidden = readout.outer(F.gelu(readout.inner(joined)))
            for a in range(2):
                token = model.embedding[tokens[row, t]]
                expected = hidden @ model.head.baseline_weight[a] + hidden @ model.head.weight[a] @ token
                torch.testing.assert_close(found[row, t, a], expected)


def test_padding_changes_nothing(lm_folders: dict[str, Path]) -> None:
    model = make_readout("q", lm_folders["llama"]).double()
    text = torch.randint(3, VOCAB, (1, 5))
    alone = model.token_rewards(text)
    left = torch.cat([torch.zeros(1, 3, dtype=torch.long), text], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 5])
    torch.testing.assert_close(model.token_rewards(left, mask)[:, 3:], alone)
    torch.testing.assert_close(
        model.token_rewards(left.flip(1), mask.flip(1))[:, :5], model.token_rewards(text.flip(1))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_reads_the_states_of_the_base_model(family: str, lm_folders: dict[str, Path]) -> None:
    """The same texts as with a forward of its own, and no forward beside that of the base model."""
    lm: Any = make_lm(family).double()
    own = make_readout("q", lm_folders[family]).double()
    guide = RewardGuide(own, {"nice": 5.0, "rude": -3.0})
    prompts = ["5 9 11", "7 8 9 10 12 13", "20"]
    calls = []
    own.backbone.register_forward_pre_hook(lambda *_: calls.append(1))
    found = generate(lm, make_number_tokenizer(), prompts, guide, samples=3, max_new_tokens=9, seed=4)
    assert not calls
    guide.start_in_turns = lambda prompts: RewardGuide.start_in_turns(guide, replace(prompts, base=None))  # pyright: ignore
    beside = generate(lm, make_number_tokenizer(), prompts, guide, samples=3, max_new_tokens=9, seed=4)
    assert calls
    assert [one.token_ids for one in found] == [one.token_ids for one in beside]
    shifts = [torch.tensor([shift for one in texts for shift in one.shifts]) for texts in (found, beside)]
    torch.testing.assert_close(*shifts, rtol=1e-4, atol=1e-5)


def step_kernels(lm: Any, guide: RewardGuide | None, rows: int, kl_budget: float | None = None) -> list[str]:
    """List the operations of one step of decoding."""
    decoder = Decoder(lm, guide)
    uniforms = np.full((rows, 9), 0.4)
    requests = [Request([5, 6], Steering(top_k=4, kl_budget=kl_budget), 9, uniforms[0])] * rows
    decoder.add([[5, 6]], [0] * rows, requests, uniforms, capacity=rows, width=64)
    decoder.draw(np.ones(rows, dtype=bool))
    decoder.read()
    with CountKernels() as count:
        decoder.draw(np.ones(rows, dtype=bool))
        decoder.read()
    return count.found


@pytest.mark.parametrize("rows", [1, 8])
def test_a_guided_step_has_few_operations_more(rows: int, lm_folders: dict[str, Path]) -> None:
    """On a GPU a step takes about as long as it has operations."""
    lm: Any = make_lm("llama")
    guide = RewardGuide(make_readout("q", lm_folders["llama"]), {"nice": 5.0, "rude": -3.0})
    plain, guided = step_kernels(lm, None, rows), step_kernels(lm, guide, rows)
    assert len(plain) > 50
    assert 0 < len(guided) - len(plain) <= 28  # one of them takes the rewards of the token that was drawn
    assert len(step_kernels(lm, guide, rows, kl_budget=0.5)) - len(guided) <= 55


@pytest.mark.parametrize("num_known", [VOCAB, VOCAB - 6])
def test_tokens_beyond_those_of_the_tokenizer_have_the_reward_of_the_prefix(
    num_known: int, lm_folders: dict[str, Path]
) -> None:
    """A base model may have rows of its embedding that stand for no token."""
    lm: Any = make_lm("llama").double()
    model: Any = make_readout("q", lm_folders["llama"]).double()
    model.vocabulary = Vocabulary(VOCAB, num_known)
    guide = RewardGuide(model, {"nice": 5.0}, clamp=False)
    decoder = Decoder(lm, guide)
    uniforms = np.full((1, 2), 0.4)
    request = Request([BOS, 6, 7], Steering(top_k=None, kl_budget=None), 2, uniforms[0])
    decoder.add([[BOS, 6, 7]], [0], [request], uniforms, capacity=1, width=8)
    shift = decoder.draw(np.ones(1, dtype=bool)).proposal.shift[0]
    wanted = 5 * model.next_rewards(torch.tensor([[BOS, 6, 7]]))[0, :, 0]
    torch.testing.assert_close(shift, wanted)
    assert len(shift[num_known:].unique()) <= 1


def test_several_readouts_and_another_guide_together(lm_folders: dict[str, Path]) -> None:
    """Readouts of different layers share one forward of the base model."""
    lm: Any = make_lm("llama").double()
    one = RewardGuide(make_readout("q", lm_folders["llama"], num_layers=1).double(), {"nice": 4.0})
    two = RewardGuide(make_readout("q", lm_folders["llama"], num_layers=2, width=5).double(), {"rude": -4.0})
    guide = two + make_guide("dexperts", "llama") + one
    found = generate(lm, make_number_tokenizer(), ["5 6", "9"], guide, samples=2, max_new_tokens=8)
    for part in (one, two):
        part.start_in_turns = lambda prompts, part=part: RewardGuide.start_in_turns(part, replace(prompts, base=None))  # pyright: ignore
    beside = generate(lm, make_number_tokenizer(), ["5 6", "9"], guide, samples=2, max_new_tokens=8)
    assert [text.token_ids for text in found] == [text.token_ids for text in beside]


def test_a_folder_holds_the_readout_alone(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    model = make_readout("q", lm_folders["gpt2"])
    model.save_pretrained(tmp_path / "readout")
    tensors = load_file(tmp_path / "readout" / "model.safetensors")
    assert not any(name.startswith("backbone.") for name in tensors)
    text = torch.randint(3, VOCAB, (1, 6))
    loaded = RewardModel.from_pretrained(tmp_path / "readout")
    assert loaded.readout is not None
    torch.testing.assert_close(loaded.token_rewards(text), model.token_rewards(text))
    lm: Any = make_lm("gpt2")
    shared = RewardModel.from_pretrained(tmp_path / "readout", lm=lm)
    assert shared.backbone is find_backbone(lm, "")
    torch.testing.assert_close(shared.token_rewards(text), model.token_rewards(text))
    assert all(parameter.requires_grad for parameter in lm.parameters())  # the language model is not changed
    guide = load_guide(f"{tmp_path / 'readout'}:nice=3", lm=lm)
    assert guide.readers[0].model is shared.backbone
    for other in ("llama", "gpt_neox"):
        with pytest.raises(ModelError, match="reads the hidden states"):
            load_guide(f"{tmp_path / 'readout'}:nice=3", lm=make_lm(other))


@pytest.mark.parametrize("stored", [True, False])
def test_whether_a_bos_is_read_is_stored(stored: bool, lm_folders: dict[str, Path], tmp_path: Path) -> None:
    """A folder that has lost its tokenizer reads as before."""
    model = make_readout("q", lm_folders["gpt2"])
    model.config.prepend_bos = stored
    model.save_pretrained(tmp_path / "readout")
    text = torch.randint(3, VOCAB, (1, 6))
    for options in ({}, {"lm": make_lm("gpt2")}):
        loaded = RewardModel.from_pretrained(tmp_path / "readout", **options)
        assert loaded.config.prepend_bos is stored
        torch.testing.assert_close(loaded.token_rewards(text), model.token_rewards(text))


@pytest.mark.parametrize("change", ["other weights", "float16", "bfloat16", "adapters", "another shape"])
def test_only_its_own_base_model_is_steered(change: str, lm_folders: dict[str, Path]) -> None:
    model = make_readout("q", lm_folders["llama"])
    lm: Any = make_lm("qwen3" if change == "another shape" else "llama")
    if change == "other weights":
        lm.model.layers[1].mlp.up_proj.weight.data.mul_(1.05)
    elif change == "adapters":
        from peft import LoraConfig, get_peft_model

        lm = get_peft_model(lm, LoraConfig(r=2, target_modules=["q_proj"]))
    elif change != "another shape":
        lm = lm.to(getattr(torch, change))
    guide = RewardGuide(model, {"nice": 1.0})
    if change in ("float16", "bfloat16"):
        guide.check_base(lm)
        assert Engine(lm, guide).decoder.reader.layers == (1, 2)
    else:
        with pytest.raises(ModelError, match="reads the hidden states"):
            generate(lm, make_number_tokenizer(), ["5 6"], guide, max_new_tokens=2)


def train_further(lm: Any) -> None:
    optimiser = torch.optim.AdamW(lm.parameters(), lr=1e-4)
    lm(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss.backward()
    optimiser.step()


def merge_other_weights(lm: Any) -> None:
    """As PEFT merges adapters: torch counts no change."""
    lm.model.layers[1].mlp.up_proj.weight.data += 0.01


def add_adapter(lm: Any) -> None:
    from peft import LoraConfig

    lm.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))


@pytest.mark.parametrize("change", [train_further, merge_other_weights, add_adapter])
@pytest.mark.parametrize("sum_of_two", [False, True])
def test_a_shared_base_model_that_changes_later_is_steered_no_more(
    change: Callable[[Any], None], sum_of_two: bool, lm_folders: dict[str, Path], tmp_path: Path
) -> None:
    make_readout("q", lm_folders["llama"]).save_pretrained(tmp_path)
    lm: Any = load_causal_lm(lm_folders["llama"])
    model = RewardModel.from_pretrained(tmp_path, lm=lm)
    guide: Any = RewardGuide(model, {"nice": 1.0})
    guide = guide + guide if sum_of_two else guide
    generate(lm, make_number_tokenizer(), ["5 6"], guide, max_new_tokens=2)
    change(lm)
    with pytest.raises(ModelError, match="reads the hidden states.*(other weights|adapters)"):
        generate(lm, make_number_tokenizer(), ["5 6"], guide, max_new_tokens=2)
    with pytest.raises(ModelError, match="reads the hidden states"):
        GuidedLogitsProcessor(guide, lm=lm)


@torch.no_grad()
@pytest.mark.parametrize("read", ["token_rewards", "next_rewards"])
def test_scores_need_the_base_model_as_it_was(read: str, lm_folders: dict[str, Path], tmp_path: Path) -> None:
    make_readout("q", lm_folders["llama"]).save_pretrained(tmp_path)
    lm: Any = load_causal_lm(lm_folders["llama"])
    model = RewardModel.from_pretrained(tmp_path, lm=lm)
    score = getattr(model, read)
    expected = score(torch.tensor([[5, 6]]))
    kept = lm.model.layers[0].mlp.up_proj.weight.clone()
    lm.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(ModelError, match="other weights"):
        score(torch.tensor([[5, 6]]))
    lm.model.layers[0].mlp.up_proj.weight.copy_(kept)
    assert torch.equal(score(torch.tensor([[5, 6]])), expected)


TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("trained", TYPES)
@pytest.mark.parametrize("steered", TYPES)
def test_a_base_model_is_known_in_every_data_type(
    stored: torch.dtype, trained: torch.dtype, steered: torch.dtype
) -> None:
    """Its checkpoint, the training of the readout, and decoding may each have another one."""
    lm = make_lm("llama").to(stored)
    lm.model.layers[0].mlp.up_proj.weight.data[0, :4] = torch.tensor([0.0, 3e-7, -5e-5, 1e-3], dtype=stored)
    sketch = sketch_weights(copy.deepcopy(lm).to(trained))
    check_base(sketch, copy.deepcopy(lm).to(steered))


@pytest.mark.parametrize("change", [1e-2, 1e-3])
@pytest.mark.parametrize("trained", TYPES)
@pytest.mark.parametrize("steered", TYPES)
def test_a_base_model_that_was_trained_a_little_further_is_another_one(
    change: float, trained: torch.dtype, steered: torch.dtype
) -> None:
    lm = make_lm("llama")
    torch.manual_seed(0)
    for weight in lm.parameters():
        weight.data += 0.1 * torch.randn_like(weight)  # weights of norms are no longer 1
    sketch = sketch_weights(copy.deepcopy(lm).to(trained))
    for weight in lm.parameters():
        weight.data *= 1 + change * torch.randn_like(weight)
    with pytest.raises(ModelError, match="has other weights"):
        check_base(sketch, lm.to(steered))


def test_layers_are_evenly_spaced() -> None:
    assert choose_readout(30, 576) == {"layers": [6, 12, 18, 24, 30], "width": 576}
    assert choose_readout(2, 16)["layers"] == [1, 2]
    assert choose_readout(30, 576, 1, 7) == {"layers": [30], "width": 7}
    with pytest.raises(OptionError, match="from 1 to 30"):
        choose_readout(30, 576, 31)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"num_beams": 3, "do_sample": False}])
def test_the_processor_of_transformers_takes_the_states_of_the_base_model(
    options: dict[str, Any], lm_folders: dict[str, Path]
) -> None:
    lm: Any = make_lm("llama").double()
    own = make_readout("q", lm_folders["llama"]).double()
    guide = RewardGuide(own, {"nice": 5.0}) + make_guide("dexperts", "llama")
    prompts = torch.tensor([[0, 5, 9, 11], [7, 8, 10, 12]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    options |= {"attention_mask": mask, "max_new_tokens": 6, "top_k": 0}
    calls = []
    own.backbone.register_forward_pre_hook(lambda *_: calls.append(1))
    watching = GuidedLogitsProcessor(guide, mask, lm=lm)
    found = lm.generate(prompts, logits_processor=[watching], **options)
    assert not calls
    beside = lm.generate(prompts, logits_processor=[GuidedLogitsProcessor(guide, mask)], **options)
    assert calls
    torch.testing.assert_close(found, beside)
    del watching
    assert not lm.model._forward_hooks  # those of the processor are gone with it
    with pytest.raises(OptionError, match="hidden states are not theirs"):
        GuidedLogitsProcessor(guide, lm=lm)(prompts, torch.zeros(2, VOCAB))
