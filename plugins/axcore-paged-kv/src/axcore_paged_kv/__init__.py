"""A paged KV cache for axcore."""
