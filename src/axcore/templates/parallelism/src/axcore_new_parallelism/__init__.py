"""Strategies of parallelism for axcore: a mesh rule, a strategy of context parallelism and a pipeline schedule."""
