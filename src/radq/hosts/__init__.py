"""Places that decode: transformers here, and radq's own loop in `radq.decoding.generate`."""
