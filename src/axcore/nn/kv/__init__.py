"""Views of keys and values in memory, and the KV caches that return them. `axcore.nn` exports it."""
