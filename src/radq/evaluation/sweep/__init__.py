"""Sweeps: list the cells, generate their texts, and measure them."""
