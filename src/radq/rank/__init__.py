"""Is the low-rank reward model enough for this data? The reward matrix, its low-rank completions, ranks of models."""
