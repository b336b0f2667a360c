"""A learned sink for each head."""

from axcore.nn import Attention, Zeros


def attention() -> Attention.Config:
    return Attention.Config(num_heads=4, num_kv_heads=2, sinks=Zeros())
