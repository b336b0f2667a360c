"""Capped logits with a custom scale."""

from axcore.nn import Attention


def attention() -> Attention.Config:
    return Attention.Config(num_heads=4, num_kv_heads=2, scale=0.2, softcap=20.0)
