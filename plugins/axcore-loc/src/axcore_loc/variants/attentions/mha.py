"""Multi-head attention."""

from axcore.nn import Attention


def attention() -> Attention.Config:
    return Attention.Config(num_heads=4)
