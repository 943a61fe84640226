"""Sources: from the name of a model to its folder, configuration, adapter, tokenizer and fingerprint."""

MODEL_TYPE = "radq"  # of reward models, in their config.json
