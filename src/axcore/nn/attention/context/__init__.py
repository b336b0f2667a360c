"""Strategies of context parallelism. Exported by `axcore.nn`."""
