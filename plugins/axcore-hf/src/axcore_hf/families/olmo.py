"""OLMo 2: norms after each block, and queries and keys normalized over all heads."""

from __future__ import annotations

from typing import Any

from axcore.nn import AcrossHeads, TransformerLayer
from axcore_hf.families.rope import ROPE
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    MLP,
    attention,
    causal_lm,
    feed_forward,
    fixed,
    norm,
    sizes,
)
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields


def olmo2(fields: Fields) -> Any:
    across = AcrossHeads.Config(norm=norm(fields))
    layer = TransformerLayer.Config(
        attention_norm=None,
        attention=attention(fields, query_norm=across, key_norm=across),
        attention_output_norm=norm(fields),
        ffn_norm=None,
        ffn=feed_forward(fields),
        ffn_output_norm=norm(fields),
    )
    return causal_lm(fields, [layer] * fields("num_hidden_layers"))


RULES = (
    *EMBEDDINGS,
    *ATTENTION,
    *MLP,
    rule("decoder.{i}.attention.query_norm.norm.scale", f"{LAYER}.self_attn.q_norm.weight"),
    rule("decoder.{i}.attention.key_norm.norm.scale", f"{LAYER}.self_attn.k_norm.weight"),
    rule("decoder.{i}.attention_output_norm.scale", f"{LAYER}.post_attention_layernorm.weight"),
    rule("decoder.{i}.ffn_output_norm.scale", f"{LAYER}.post_feedforward_layernorm.weight"),
)

FAMILIES = (
    Family(
        "OLMo 2",
        ("olmo2",),
        olmo2,
        fixed(RULES),
        defaults={
            **sizes(vocab=50_304, hidden=4096, intermediate=11_008, layers=32, heads=32),
            **ROPE,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
        },
        no_effect={"mlp_bias", "partial_rotary_factor"},
    ),
)
