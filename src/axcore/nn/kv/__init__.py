"""Keys and values: how they lie in memory (views), and the caches that keep them. `axcore.nn` exports it."""
