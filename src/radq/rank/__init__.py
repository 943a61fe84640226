"""The reward matrix of a data set, its low-rank completions, and the ranks of trained reward models."""
