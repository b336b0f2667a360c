"""Phi-3: queries, keys and values in one tensor, gate and up in another."""

from __future__ import annotations

from typing import Any

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
    window,
)
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields
from axcore_hf.transforms import Fused


def phi3(fields: Fields) -> Any:
    mixer = attention(fields, bias=False, mask=window(fields("sliding_window", None)))
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

FAMILIES = (Family("Phi-3", ("phi3",), phi3, fixed(RULES)),)
