"""Seed-OSS: Llama with separate options for the biases of queries, keys and values, and of the projection."""

from __future__ import annotations

from typing import Any

from axcore_hf.families.llama import RULES
from axcore_hf.families.rope import ROPE
from axcore_hf.families.shared import attention, causal_lm, feed_forward, fixed, pre_norm, sizes
from axcore_hf.family import Family
from axcore_hf.fields import Fields, OrNull


def seed_oss(fields: Fields) -> Any:
    mixer = attention(fields, output_bias=fields("attention_out_bias"))
    block = feed_forward(fields, bias=fields("mlp_bias"))
    return causal_lm(fields, [pre_norm(fields, mixer, block)] * fields("num_hidden_layers"))


FAMILIES = (
    Family(
        "Seed-OSS",
        ("seed_oss",),
        seed_oss,
        fixed(RULES),
        defaults={
            **sizes(vocab=155_136, hidden=4096, intermediate=27_648, layers=64, heads=80),
            **ROPE,
            "num_key_value_heads": OrNull(8),
            "head_dim": OrNull(128),
            "hidden_act": "silu",
            "max_position_embeddings": 524_288,
            "rms_norm_eps": 1e-6,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
        no_effect={"partial_rotary_factor", "residual_dropout"},
    ),
)
