"""Strategies of parallelism for axcore: tensor parallelism over pairs of GPUs, and attention to gathered keys."""
