"""Biases on queries, keys and values."""

from axcore.nn import Attention, Linear


def attention() -> Attention.Config:
    biased = Linear.Config(use_bias=True)
    return Attention.Config(num_heads=4, query=biased, key=biased, value=biased)
