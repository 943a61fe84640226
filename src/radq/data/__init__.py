"""Data: tables from files, tokenised reward data, prompts, and generations of other programs."""
