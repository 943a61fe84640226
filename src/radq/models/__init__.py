"""Models: reward models and their heads, the cache of keys and values, loading, and the embedded default."""

MODEL_TYPE = "radq"  # of reward models, in their config.json
