"""Readouts of RAD-V: values of texts from the hidden states of the base model, against brute force."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from families import BOS, FAMILIES, VOCAB, make_lm, make_number_tokenizer, make_readout, make_reward
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from radq import generate
from radq.decoding.generate import Generation
from radq.errors import ModelError, OptionError
from radq.guides.meter import Meter
from radq.guides.reward import RewardGuide
from radq.guides.spec import load_guide
from radq.hosts.base_states import reads_shown
from radq.hosts.transformers import GuidedLogitsProcessor
from radq.models import kinds, kv_cache
from radq.models.convert import save_token_classifier
from radq.models.kinds import RadQ, RadV
from radq.models.loading import find_backbone
from radq.models.reward import RewardModel
from radq.numerics import pad_left

TOKENIZER = make_number_tokenizer()
WEIGHTS = {"nice": 5.0, "rude": -3.0}
PROMPTS = ["5 9 11", "7 8 9 10 12 13", "20"]

tokens_of_text = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=8)
some_texts = st.lists(tokens_of_text | tokens_of_text.map(lambda text: [BOS, *text]), min_size=1, max_size=4)


def make_value(folder: Path, prepend_bos: bool = False, **options: Any) -> RadV:
    """Make a readout in float64."""
    model = make_readout("v", folder, dtype=torch.float64, **options)
    assert isinstance(model, RadV)
    assert model.readout is not None
    model.readout.outer.weight.data.mul_(10)  # a readout begins with small rewards
    model.config.prepend_bos = prepend_bos
    return model


# --- rewards ---


@pytest.mark.parametrize("prepend_bos", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rewards_of_texts_are_those_of_the_formula(family: str, prepend_bos: bool, lm_folders: dict[str, Path]) -> None:
    model = make_value(lm_folders[family], prepend_bos)
    text = torch.randint(3, VOCAB, (7,), generator=torch.Generator().manual_seed(0)).tolist()
    found = model.token_rewards(torch.tensor([text]))[0]
    expected = torch.stack([oracle.reward(model, text[:t], text[t]) for t in range(7)])
    torch.testing.assert_close(found, expected)
    assert found.std() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_rewards_of_candidates_are_those_of_every_text_read_alone(family: str, lm_folders: dict[str, Path]) -> None:
    """Also after tokens that were candidates, whose keys and values are kept, and after one that was none."""
    model = make_value(lm_folders[family])
    texts = [[5, 9, 11], [7, 8, 10, 12, 13, 14], [20]]
    state = model.read(*pad_left(texts))
    candidates = torch.tensor([[3, 30, 5, 17], [9, 9, 4, 33], [8, 6, 12, 3]])
    for step, tokens in enumerate([[30, 4, 3], [31, 10, 7], [21, 22, 23], [5, 6, 7]]):
        found, state = model.score(state, candidates + step)
        for row, text in enumerate(texts):
            torch.testing.assert_close(found[row], oracle.rewards(model, text, (candidates + step)[row].tolist()))
        state = state.advance(torch.tensor(tokens))
        texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]


@settings(max_examples=25, deadline=None)
@given(some_texts, st.booleans(), st.integers(0, 3), st.integers(0, 99))
def test_padding_and_other_texts_change_no_rewards(
    lm_folders: dict[str, Path], texts: list[list[int]], prepend_bos: bool, padding: int, seed: int
) -> None:
    model = make_value(lm_folders["llama"], prepend_bos)
    input_ids, mask = (F.pad(values, (0, padding)) for values in pad_left(texts))
    last = mask.sum(0).nonzero().max()
    found = model.token_rewards(input_ids, mask)[:, last]
    stored = model.link(model(input_ids, mask, states=model.base_states(input_ids, mask)).rewards)[:, last]
    candidates = torch.randint(0, VOCAB, (len(texts), 5), generator=torch.Generator().manual_seed(seed))
    rewards = model.next_rewards(input_ids, mask, candidates)
    for row, text in enumerate(texts):
        expected = oracle.reward(model, text[:-1], text[-1])
        torch.testing.assert_close(found[row], expected)
        torch.testing.assert_close(stored[row], expected)
        torch.testing.assert_close(rewards[row], oracle.rewards(model, text, candidates[row].tolist()))


def test_the_whole_vocabulary_is_read_in_parts(lm_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_value(lm_folders["llama"])
    monkeypatch.setattr(kinds, "SIBLINGS_PER_FORWARD", 7)
    found = model.next_rewards(torch.tensor([[5, 9, 11]]))[0]
    torch.testing.assert_close(found, oracle.rewards(model, [5, 9, 11], range(VOCAB)))


# --- guidance ---


def generate_from(lm: Any, guide: Any, **options: Any) -> list[Generation]:
    fixed = {"samples": 2, "max_new_tokens": 9, "seed": 4, "stop_token_ids": [], "kl_budget": None}
    return generate(lm, TOKENIZER, PROMPTS, guide, **fixed | options)


@pytest.mark.parametrize("in_slots", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_adds_the_rewards_of_brute_force(
    family: str, in_slots: bool, lm_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward model shares the weights of the base model, and both read with keys and values of their own."""
    model = make_value(lm_folders[family])
    model.save_pretrained(tmp_path / "value")
    lm: Any = make_lm(family).double()
    guide = RewardGuide(RewardModel.from_pretrained(tmp_path / "value", lm=lm), WEIGHTS)
    assert guide.model.backbone is find_backbone(lm, "")
    if not in_slots:  # candidates as rows of their own
        monkeypatch.setattr("radq.models.slots.takes_slots", lambda reader: False)
        monkeypatch.setattr(kv_cache, "takes_siblings", lambda backbone: False)
    for text in generate_from(lm, guide):
        before = [int(word) for word in text.prompt.split()]
        expected = []
        for token in text.token_ids:
            nice, rude = oracle.reward(model, before, token).tolist()
            expected.append(5 * nice - 3 * rude)
            before.append(token)
        torch.testing.assert_close(text.shifts, expected, rtol=1e-5, atol=1e-5)
        assert max(map(abs, expected)) > 0.1


def test_together_with_other_guides(lm_folders: dict[str, Path]) -> None:
    """A readout of RAD-Q takes states from the base model's forward, and a RAD-V beside it reads for itself."""
    lm: Any = make_lm("llama").double()
    value = RewardGuide(make_value(lm_folders["llama"]), {"nice": 4.0})
    q = RewardGuide(make_readout("q", lm_folders["llama"], num_layers=1).double(), {"rude": -4.0})
    own = RewardGuide(make_reward("v", lm_folders["llama"]), {"nice": 2.0})
    found = generate_from(lm, value + q + own)
    q.start_in_turns = lambda prompts: RewardGuide.start_in_turns(q, replace(prompts, base=None))  # pyright: ignore
    assert [text.token_ids for text in generate_from(lm, value + q + own)] == [text.token_ids for text in found]


def test_the_processor_of_transformers_lets_it_read(lm_folders: dict[str, Path]) -> None:
    lm: Any = make_lm("llama").double()
    model = make_value(lm_folders["llama"])
    prompts = torch.tensor([[0, 5, 9, 11], [7, 8, 10, 12]])
    mask = (prompts > 0).long()
    processor = GuidedLogitsProcessor(RewardGuide(model, WEIGHTS), mask, top_k=6, lm=lm, kl_budget=None)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "top_k": 0, "do_sample": False}
    for row, text in enumerate(lm.generate(prompts, logits_processor=[processor], **options).tolist()):
        first = int(mask[row].argmax())
        for end in range(4, len(text)):
            assert text[end] == int(oracle.guided_logits(lm, model, WEIGHTS, text[first:end], top_k=6).argmax())


def test_a_meter_counts_candidates_and_not_the_base_model(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    """Though both run the same modules."""
    make_value(lm_folders["llama"]).save_pretrained(tmp_path / "value")
    lm: Any = make_lm("llama").double()
    guide = RewardGuide(RewardModel.from_pretrained(tmp_path / "value", lm=lm), WEIGHTS)
    with Meter(guide) as meter:
        generate_from(lm, meter, top_k=7)
    assert (meter.prompts.calls, int(meter.prompts.tokens)) == (1, 10)
    assert (meter.calls_per_step, meter.tokens_per_token) == (1, 7)


def test_vllm_does_not_take_it_for_a_readout_of_the_last_states(lm_folders: dict[str, Path]) -> None:
    for kind, expected in (("q", True), ("v", False)):
        model = make_readout(kind, lm_folders["llama"], num_layers=1)
        assert reads_shown(RewardGuide(model, {"nice": 1.0}), (2,)) is expected


# --- folders ---


def test_a_folder_holds_the_readout_alone(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    model = make_value(lm_folders["gpt2"]).float()
    model.save_pretrained(tmp_path / "value")
    assert {name.split(".")[0] for name in load_file(tmp_path / "value" / "model.safetensors")} == {"readout", "head"}
    text = torch.randint(3, VOCAB, (1, 6))
    lm: Any = make_lm("gpt2")
    for options in ({}, {"lm": lm}):
        loaded = RewardModel.from_pretrained(tmp_path / "value", **options)
        assert isinstance(loaded, RadV)
        assert torch.equal(loaded.token_rewards(text), model.token_rewards(text))
    shared = RadV.from_pretrained(tmp_path / "value", lm=lm)
    assert shared.backbone is find_backbone(lm, "")
    assert all(parameter.requires_grad for parameter in lm.parameters())  # the language model is not changed


def test_only_its_own_base_model_is_read_and_steered(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    model = make_value(lm_folders["llama"])
    model.save_pretrained(tmp_path / "value")
    changed: Any = make_lm("llama").double()
    changed.model.layers[1].mlp.up_proj.weight.data.mul_(1.05)
    for lm in (changed, make_lm("qwen3")):
        with pytest.raises(ModelError, match="reads the hidden states"):
            RewardModel.from_pretrained(tmp_path / "value", lm=lm)
        with pytest.raises(ModelError, match="reads the hidden states"):
            load_guide(f"{tmp_path / 'value'}:nice=3", lm=lm)
        with pytest.raises(ModelError, match="reads the hidden states"):
            generate_from(lm, RewardGuide(model, WEIGHTS))


def test_what_needs_a_transformer_of_its_own_is_refused(lm_folders: dict[str, Path], tmp_path: Path) -> None:
    model = make_value(lm_folders["llama"])
    with pytest.raises(ModelError, match="no token classifier with a readout"):
        save_token_classifier(model, tmp_path / "classifier")
    assert not (tmp_path / "classifier").exists()
    with pytest.raises(OptionError, match="the teacher is a readout") as caught:
        RadQ.from_teacher(model)
    assert "--reads base" in str(caught.value.hint)
