"""Nemotron 3 and 4, Minitron: zero-centred LayerNorm, squared ReLU, RoPE of half of each head."""

from __future__ import annotations

from typing import Any

from axcore.config import ConfigError
from axcore.nn import LayerNorm
from axcore_hf.families.rope import ROPE
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER_NORMS,
    MLP,
    attention,
    causal_lm,
    feed_forward,
    fixed,
    pre_norm,
    sizes,
)
from axcore_hf.family import Family
from axcore_hf.fields import Fields


def nemotron(fields: Fields) -> Any:
    if fields("num_key_value_heads") is None:  # transformers raises an error
        raise ConfigError(f"{fields.where}: num_key_value_heads must be set for model_type 'nemotron'")
    norm = LayerNorm.Config(eps=fields("norm_eps"), zero_centred=True)
    layer = pre_norm(fields, attention(fields), feed_forward(fields, bias=fields("mlp_bias"), gate=None), norm)
    return causal_lm(fields, [layer] * fields("num_hidden_layers"), norm=norm)


FAMILIES = (
    Family(
        "Nemotron",
        ("nemotron",),
        nemotron,
        fixed((*EMBEDDINGS, *LAYER_NORMS, *ATTENTION, *MLP)),
        defaults={
            **sizes(vocab=256_000, hidden=6144, intermediate=24_576, layers=32, heads=48),
            **ROPE,
            "head_dim": None,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "partial_rotary_factor": 0.5,
        },
    ),
)
