"""Phi-3: queries, keys and values in one tensor, gate and up in another."""

from __future__ import annotations

from typing import Any

from axcore_hf.families.rope import ROPE, rope
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    MLP,
    NORMS,
    attention,
    causal_lm,
    feed_forward,
    fixed,
    pre_norm,
    sizes,
    window,
)
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields
from axcore_hf.transforms import Fused


def phi3(fields: Fields) -> Any:
    position = rope(fields, types=("default", "longrope", "su"))
    mixer = attention(fields, bias=False, position=position, mask=window(fields("sliding_window")))
    return causal_lm(fields, [pre_norm(fields, mixer, feed_forward(fields))] * fields("num_hidden_layers"))


HEADS = tuple(f"decoder.{{i}}.attention.{name}.weight" for name in ("query", "key", "value"))
GATED = ("decoder.{i}.ffn.gate.weight", "decoder.{i}.ffn.up.weight")
APART = {*HEADS, *GATED}
RULES = (
    *EMBEDDINGS,
    *NORMS,
    *(each for each in (*ATTENTION, *MLP) if each.ours[0] not in APART),
    rule(HEADS, f"{LAYER}.self_attn.qkv_proj.weight", Fused()),
    rule(GATED, f"{LAYER}.mlp.gate_up_proj.weight", Fused()),
)

FAMILIES = (
    Family(
        "Phi-3",
        ("phi3",),
        phi3,
        fixed(RULES),
        defaults={
            **sizes(vocab=32_064, hidden=3072, intermediate=8192, layers=32, heads=32),
            **ROPE,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        no_effect={"attention_bias", "mlp_bias"},
    ),
)
