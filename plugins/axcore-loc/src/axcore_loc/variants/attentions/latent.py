"""Latent attention: keys and values of all heads are projected from one vector."""

from axcore.nn import BaseAttention, LatentAttention


def attention() -> BaseAttention.Config:
    return LatentAttention.Config(
        num_heads=4, kv_lora_rank=12, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, value_dim=8
    )
