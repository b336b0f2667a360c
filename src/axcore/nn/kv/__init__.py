"""Views of keys and values in memory, and the KV caches that return them. Exported by `axcore.nn`."""
