"""A small language model of Python code, for axcore."""
