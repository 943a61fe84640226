"""A tiny language model whose tokens are bytes and words of JSON, so that it can write any text."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<end>"
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
POSITIONS = 512


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of single bytes and a few merges, with a token that ends texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "r"), ("u", "e"), ("tr", "ue"), ('"', ":"), ("{", '"')]
    words = [END, *alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, chat_template=CHAT)


def make_byte_lm() -> LlamaForCausalLM:
    torch.manual_seed(0)
    size = len(make_byte_tokenizer())
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=0,
    )
    lm = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        lm.lm_head.weight.mul_(20.0)  # so that it prefers some tokens
    return lm


def save_byte_lm(folder: Path) -> Path:
    make_byte_lm().save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    return folder
