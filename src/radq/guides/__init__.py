"""Guides compute what is added to the base model's logits, token by token. `base` has their protocol."""
