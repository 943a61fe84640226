"""Shapes of well-known models. Random weights of the same shape take as long as the real ones, and need no download.

Importing this module imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A language model and the reward model that steers it, as fields of their configurations.

    Args:
        family: the name of the architecture in transformers.
        shared: fields of both models.
        lm: fields of the language model alone.
        reward: fields of the reward model's backbone alone.
    """

    family: str
    shared: Mapping[str, int | bool]
    lm: Mapping[str, int]
    reward: Mapping[str, int]

    @property
    def vocab_size(self) -> int:
        return self.shared["vocab_size"]


_SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
_TINY_LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}

SHAPES = {
    # GPT-2-Large, steered by a reward model over GPT-2-small
    "gpt2-large": Shape(
        "gpt2",
        {"vocab_size": 50257, "n_positions": 1024},
        {"n_embd": 1280, "n_layer": 36, "n_head": 20},
        {"n_embd": 768, "n_layer": 12, "n_head": 12},
    ),
    # SmolLM2-135M, steered by a reward model over its first 12 layers
    "smollm2": Shape("llama", {"vocab_size": 49152, **_SMOLLM2}, {"num_hidden_layers": 30}, {"num_hidden_layers": 12}),
    # LLaMA-7B, steered by a reward model over TinyLlama
    "llama-7b": Shape("llama", {"vocab_size": 32000, "tie_word_embeddings": False}, _LLAMA_7B, _TINY_LLAMA),
}
