"""Data: tables from files, tokenised texts with labels, prompts, and generations of other programs."""
