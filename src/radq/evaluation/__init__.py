"""Evaluation: prompts, judges and metrics, each a room that knows nothing of the others."""
