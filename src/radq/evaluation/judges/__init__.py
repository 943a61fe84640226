"""Judges: models that score finished texts."""
