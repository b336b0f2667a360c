"""Multi-query attention: all heads share keys and values."""

from axcore.nn import Attention


def attention() -> Attention.Config:
    return Attention.Config(num_heads=4, num_kv_heads=1)
