"""StableLM 2 and 3B: LayerNorm, RoPE of a quarter of each head; the 12B also has parallel blocks and norms per head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axcore.nn import LayerNorm, ParallelLayer, PerHeadNorm, TransformerLayer, layers_of
from axcore_hf.families.rope import ROPE
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    LAYER_NORMS,
    MLP,
    attention,
    causal_lm,
    check_heads,
    feed_forward,
    fixed,
    layer_norm,
    pre_norm,
    sizes,
)
from axcore_hf.family import Family, Rule, rule
from axcore_hf.fields import Fields
from axcore_hf.transforms import Joined


def stablelm(fields: Fields) -> Any:
    check_heads(fields)
    fields.only("head_dim", None, fields("hidden_size") // fields("num_attention_heads"))
    norm = LayerNorm.Config(eps=fields("layer_norm_eps"))
    normed = PerHeadNorm.Config(norm=norm.set(use_bias=False)) if fields("qk_layernorm") else None
    mixer = attention(fields, bias=fields("use_qkv_bias"), output_bias=False, query_norm=normed, key_norm=normed)
    ffn = feed_forward(fields)
    layer: ParallelLayer.Config | TransformerLayer.Config
    if fields("use_parallel_residual"):
        layer = ParallelLayer.Config(norm=norm, attention=mixer, ffn=ffn)
    else:
        layer = pre_norm(fields, mixer, ffn, norm)
    return causal_lm(fields, [layer] * fields("num_hidden_layers"), norm=norm)


FIXED = (
    *EMBEDDINGS,
    *LAYER_NORMS,
    *layer_norm("decoder.{i}.norm", f"{LAYER}.input_layernorm"),
    *ATTENTION,
    *MLP,
)


def rules(cfg: Any) -> Sequence[Rule]:
    layer: Any = layers_of(cfg.decoder)[0].config

    def of_heads(ours: str, theirs: str, heads: int) -> Rule:
        names = [f"{LAYER}.self_attn.{theirs}.norms.{head}.weight" for head in range(heads)]
        return rule(f"decoder.{{i}}.attention.{ours}.norm.scale", names, Joined(heads))

    query = of_heads("query_norm", "q_layernorm", layer.attention.num_heads)
    key = of_heads("key_norm", "k_layernorm", layer.attention.num_kv_heads)
    return fixed((*FIXED, query, key))(cfg)


FAMILIES = (
    Family(
        "StableLM",
        ("stablelm",),
        stablelm,
        rules,
        defaults={
            **sizes(vocab=50_304, hidden=2560, intermediate=6912, layers=32, heads=32),
            **ROPE,
            "num_key_value_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "partial_rotary_factor": 0.25,
        },
        no_effect={"attention_bias", "mlp_bias"},
    ),
)
