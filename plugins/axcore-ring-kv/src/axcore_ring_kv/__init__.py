"""A KV cache for sliding-window attention, for axcore."""
