"""Strategies of parallelism for axcore: a mesh rule, a form of context parallelism and a pipeline schedule."""
