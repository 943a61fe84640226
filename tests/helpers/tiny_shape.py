"""A shape of random models that are made in no time."""

from radq.benchmark.config import Shape

TINY = Shape(
    "llama",
    {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
    {"num_hidden_layers": 2},
    {"num_hidden_layers": 1},
)
