"""Forms of context parallelism. Exported by `axcore.nn`."""
