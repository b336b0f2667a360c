"""Latent attention: keys and values of all heads are made of one vector."""

from axcore.nn import BaseAttention, LatentAttention


def attention() -> BaseAttention.Config:
    return LatentAttention.Config(num_heads=4, kv_rank=12, query_rank=16, content_dim=8, position_dim=4, value_dim=8)
