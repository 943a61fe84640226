"""Models: reward models and their heads, the cache of keys and values, loading, and the embedded default."""
