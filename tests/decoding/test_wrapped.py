"""Base models inside wrappers decode what they decode without; families with habits of their own are read right."""

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from families import VOCAB, make_lm, make_number_tokenizer, make_reward
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Llama4TextConfig, MarianConfig, OPTConfig, Phi3Config, PreTrainedConfig

from radq.decoding.generate import generate
from radq.errors import ContextLengthError, ModelError
from radq.guides.reward import RewardGuide
from radq.models import kv_cache
from radq.models.kinds import RadQ
from radq.models.loading import max_positions
from radq.models.reward import RewardModel
from radq.sources.hub import quiet

pytestmark = pytest.mark.slow

TOKENIZER = make_number_tokenizer()
PROMPTS = ["5 9 3 12 30", "11", "6 6 31 14 3 8 20 21"]
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Hiding(nn.Module):
    """A wrapper that takes no positions and hands none on."""

    def __init__(self, lm: Any):
        super().__init__()
        self.lm, self.config, self.generation_config = lm, lm.config, lm.generation_config

    @property
    def device(self) -> torch.device:
        return self.lm.device

    def get_output_embeddings(self) -> nn.Module:
        return self.lm.get_output_embeddings()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Any, use_cache: bool) -> Any:
        return self.lm(input_ids, attention_mask=attention_mask, past_key_values=past_key_values, use_cache=use_cache)


def in_peft(lm: Any) -> Any:
    """An adapter that is zero changes nothing."""
    target = "c_attn" if lm.config.model_type == "gpt2" else "q_proj"
    return get_peft_model(lm, LoraConfig(r=2, target_modules=[target], fan_in_fan_out=target == "c_attn"))


def compiled(lm: Any) -> Any:
    return torch.compile(lm, backend="eager", dynamic=True)


@pytest.mark.parametrize(  # not a compiled LLaMA: the shape checker of the tests cannot be compiled
    ("family", "wrap"),
    [("gpt2", in_peft), ("llama", in_peft), ("gpt2", lambda lm: compiled(in_peft(lm)))],
)
def test_a_wrapped_base_decodes_padded_batches_as_the_base_itself(
    family: str, wrap: Any, lm_folders: dict[str, Path]
) -> None:
    guide = RewardGuide(make_reward("q", lm_folders[family]), {"nice": 5.0})
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 3, "stop_token_ids": []}
    expected = [g.token_ids for g in generate(make_lm(family).double(), TOKENIZER, PROMPTS, guide, **options)]
    wrapped = wrap(make_lm(family).double())
    assert [g.token_ids for g in generate(wrapped, TOKENIZER, PROMPTS, guide, **options)] == expected
    assert [generate(wrapped, TOKENIZER, [p], guide, **options)[0].token_ids for p in PROMPTS] == expected


def test_padding_is_refused_where_positions_cannot_be_given() -> None:
    lm, hiding = make_lm("gpt2"), Hiding(make_lm("gpt2"))
    for prompt in PROMPTS:  # one by one there is nothing to get wrong
        alone, expected = (generate(model, TOKENIZER, [prompt], temperature=0)[0].token_ids for model in (hiding, lm))
        assert alone == expected
    with pytest.raises(ModelError, match=r"Hiding gives other results for a padded text.*one by one"):
        generate(hiding, TOKENIZER, PROMPTS)


def test_a_trial_in_training_mode_is_no_trial_of_dropout() -> None:
    lm = make_lm("gpt2").train()
    kv_cache.check_padding(lm)
    assert lm.training


def make_family(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    with torch.no_grad(), quiet():
        for parameter in lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
        lm.save_pretrained(folder)
    return folder


def llama4() -> PreTrainedConfig:
    return Llama4TextConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        num_local_experts=2,
        attention_chunk_size=4,  # shorter than the texts
        layer_types=["chunked_attention", "full_attention"],
        **SPECIAL,
    )


def opt_350m() -> PreTrainedConfig:
    return OPTConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        word_embed_proj_dim=8,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        do_layer_norm_before=False,
        **SPECIAL,
    )


def phi3_longrope() -> PreTrainedConfig:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]}
    return Phi3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters=rope | {"original_max_position_embeddings": 16, "partial_rotary_factor": 1.0},
        **SPECIAL,
    )


@pytest.mark.parametrize("make_config", [llama4, opt_350m, phi3_longrope])
@pytest.mark.parametrize("kind", ["q", "v"])
@torch.no_grad()
def test_rewards_of_unusual_families_equal_brute_force(kind: str, make_config: Any, tmp_path: Path) -> None:
    model = make_reward(kind, make_family(make_config(), tmp_path / "lm"))
    texts = [[5, 9, 3, 12, 30, 7, 8, 22, 4, 11], [11, 4]]
    ids = torch.tensor([texts[0], [0] * 8 + texts[1]])
    candidates = torch.tensor([[4, 9, 13], [7, 36, 5]])

    def check(rewards: Tensor, texts: list[list[int]]) -> None:
        rows = zip(texts, candidates.tolist(), strict=True)
        expected = torch.stack([torch.stack([oracle.reward(model, text, v) for v in row]) for text, row in rows])
        torch.testing.assert_close(rewards, expected, atol=1e-6, rtol=1e-6)

    state = model.read(ids, (ids > 0).long())
    rewards, state = model.score(state, candidates)
    check(rewards, texts)
    longer = state.advance(torch.tensor([9, 7]))
    check(model.score(longer, candidates)[0], [[*texts[0], 9], [*texts[1], 7]])
    model.save_pretrained(tmp_path / "reward")
    loaded = RewardModel.from_pretrained(tmp_path / "reward")
    assert torch.equal(loaded.token_rewards(ids), model.token_rewards(ids))


def test_longrope_ends_where_its_frequencies_would_change(tmp_path: Path) -> None:
    """Beyond, a text's numbers would depend on whether a long one stands beside it."""
    folder = make_family(phi3_longrope(), tmp_path / "lm")
    model = make_reward("q", folder)
    assert max_positions(phi3_longrope()) == model.reader.max_positions == 16
    model.token_rewards(torch.full((1, 15), 5))
    with pytest.raises(ContextLengthError, match=r"16 positions \(beyond them, longrope"):
        model.token_rewards(torch.full((1, 16), 5))
    lm = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ContextLengthError, match=r"exceeds the base model's 16 positions \(beyond them, longrope"):
        generate(lm, TOKENIZER, ["5 6"], max_new_tokens=15)


def test_a_backbone_without_a_plain_decoder_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    config = MarianConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        is_decoder=True,
        decoder_start_token_id=0,
        **SPECIAL,
    )
    with pytest.raises(ModelError, match="MarianForCausalLM, which has no plain decoder"):
        RadQ.from_backbone(make_family(config, tmp_path / "lm"), attributes=["nice"])
