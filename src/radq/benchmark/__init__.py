"""The benchmark: time per token of decoding with every kind of guide, beside naive ways to compute the same rewards."""
