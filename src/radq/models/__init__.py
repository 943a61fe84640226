"""Models: reward models and their heads, readers of texts, the cache of keys and values, loading."""
