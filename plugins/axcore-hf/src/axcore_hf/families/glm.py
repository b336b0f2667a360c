"""GLM-4: interleaved RoPE of a part of each head, and gate and up in one tensor."""

from __future__ import annotations

from typing import Any

from axcore_hf.families.rope import ROPE, rope
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    FUSED_MLP,
    LAYER,
    NORMS,
    attention,
    causal_lm,
    feed_forward,
    fixed,
    norm,
    pre_norm,
    sizes,
)
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields


def _layer(fields: Fields) -> Any:
    mixer = attention(fields, output_bias=False, position=rope(fields, layout="interleaved"))
    return pre_norm(fields, mixer, feed_forward(fields))


def glm(fields: Fields) -> Any:
    return causal_lm(fields, [_layer(fields)] * fields("num_hidden_layers"))


def glm4(fields: Fields) -> Any:
    layer = _layer(fields).set(attention_output_norm=norm(fields), ffn_output_norm=norm(fields))
    return causal_lm(fields, [layer] * fields("num_hidden_layers"))


RULES = (
    *EMBEDDINGS,
    *NORMS,
    *ATTENTION,
    *FUSED_MLP,
    rule("decoder.{i}.attention_output_norm.scale", f"{LAYER}.post_self_attn_layernorm.weight"),
    rule("decoder.{i}.ffn_output_norm.scale", f"{LAYER}.post_mlp_layernorm.weight"),
)
DEFAULTS = {
    **sizes(vocab=151_552, hidden=4096, intermediate=13_696, layers=40, heads=32),
    **ROPE,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}

FAMILIES = (
    Family("GLM", ("glm",), glm, fixed(RULES), defaults=DEFAULTS, no_effect={"mlp_bias"}),
    Family("GLM-4", ("glm4",), glm4, fixed(RULES), defaults=DEFAULTS, no_effect={"mlp_bias"}),
)
