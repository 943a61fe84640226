"""Tiny random models of the backbone families radq is tested on, and reward models over them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from radq.models.kinds import RadQ, RadV
from radq.models.reward import RewardModel

VOCAB = 37
BOS, EOS = 1, 2

_COMMON: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0}
_LLAMA: dict[str, Any] = _COMMON | {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}

FAMILIES = {
    "gpt2": lambda: GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=64, **_COMMON),
    "llama": lambda: LlamaConfig(**_LLAMA),
    "qwen3": lambda: Qwen3Config(**_LLAMA, tie_word_embeddings=True),
    "gpt_neox": lambda: GPTNeoXConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        **_COMMON,
    ),
    # windows shorter than the texts of the tests, so that what leaves them matters
    "gemma3": lambda: Gemma3TextConfig(
        **_LLAMA, sliding_window=4, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=4
    ),
    "mistral": lambda: MistralConfig(**_LLAMA, sliding_window=4),
}


def make_lm(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():  # the usual initialisation is so small that a wrong mask would hardly show
        for parameter in lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return lm.eval()


def make_number_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer that reads "5 9 3" as the tokens 5, 9 and 3, for models that have none."""
    special = ["<pad>", "<s>", "</s>"]
    names = special + [str(number) for number in range(len(special), VOCAB)]
    numbers = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    numbers.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=numbers, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )


def make_byte_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of single bytes as GPT-2's was published: encoder.json and vocab.bpe, here without merges."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    (folder / "encoder.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    (folder / "vocab.bpe").write_text("#version: 0.2\n")
    return folder


def make_reward(kind: str, folder: Path, attributes: tuple[str, ...] = ("nice", "rude"), **options: Any) -> RewardModel:
    """Make an untrained reward model in float64."""
    torch.manual_seed(1)
    model_class = RadQ if kind == "q" else RadV
    model = model_class.from_backbone(folder, attributes=attributes, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() < 3 else 0.5))
    if "response_range" not in options:  # such that clamping meets some of the rewards
        rewards = model.next_rewards(torch.tensor([[5, 6, 7], [8, 9, 10]]))
        model.config.response_range = rewards.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    return model


def make_readout(kind: str, folder: Path, **options: Any) -> RewardModel:
    """Make a readout with random weights, whose rewards differ clearly."""
    torch.manual_seed(1)
    model = (RadQ if kind == "q" else RadV).from_base(folder, ["nice", "rude"], **options)
    assert model.readout is not None
    with torch.no_grad():
        model.readout.empty.normal_()
        for parameter in model.head.parameters():
            parameter.normal_(std=0.3)
    model.config.response_range = [-100.0, 100.0]
    return model
