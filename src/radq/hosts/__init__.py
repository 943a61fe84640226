"""Hosts: guided decoding inside the loops of other libraries, transformers' `generate` and vLLM."""
