"""Heads whose total width exceeds the model's."""

from axcore.nn import Attention


def attention() -> Attention.Config:
    return Attention.Config(num_heads=4, num_kv_heads=2, head_dim=24)
