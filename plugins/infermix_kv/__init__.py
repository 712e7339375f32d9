"""KV layouts that make the cache smaller, shared, or elsewhere."""
