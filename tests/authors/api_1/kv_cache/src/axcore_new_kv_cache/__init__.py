"""A KV cache for sliding-window attention that keeps a window of tokens, for axcore."""
