"""Sweeps: which cells to generate, generating them, and measuring what was generated."""
