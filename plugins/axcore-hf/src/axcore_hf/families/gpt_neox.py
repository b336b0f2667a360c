"""GPT-NeoX: attention and feed-forward block in parallel, biases, queries, keys and values in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axcore.config import ConfigError
from axcore.nn import LayerNorm, ParallelLayer, TransformerLayer, layers_of
from axcore_hf.families.rope import ROPE, rope
from axcore_hf.families.shared import (
    attention,
    causal_lm,
    check_heads,
    feed_forward,
    fixed,
    fused_qkv,
    layer_norm,
    linear,
    pre_norm,
)
from axcore_hf.family import Family, Rule, rule
from axcore_hf.fields import Fields
from axcore_hf.transforms import ByHead, Transposed


def gpt_neox(fields: Fields) -> Any:
    check_heads(fields)
    heads, norm = fields("num_attention_heads"), LayerNorm.Config(eps=fields("layer_norm_eps"))
    head_dim = fields("hidden_size") // heads
    mixer = attention(fields, num_kv_heads=heads, head_dim=head_dim, position=_position(fields, head_dim))
    ffn = feed_forward(fields, bias=True, gate=None)
    layer: ParallelLayer.Config | TransformerLayer.Config
    if fields("use_parallel_residual"):
        layer = ParallelLayer.Config(norm=norm, attention=mixer, ffn_norm=norm, ffn=ffn)
    else:
        layer = pre_norm(fields, mixer, ffn, norm)
    return causal_lm(fields, [layer] * fields("num_hidden_layers"), norm=norm)


def _position(fields: Fields, head_dim: int) -> Any:
    theta, fraction = fields("rotary_emb_base"), fields("rotary_pct")
    for usual, own, value in (
        ("rope_theta", "rotary_emb_base", theta),
        ("partial_rotary_factor", "rotary_pct", fraction),
    ):
        if fields.optional(usual) not in (None, value):
            raise ConfigError(
                f"{fields.where}: {usual}={fields(usual)!r} differs from {own}={value!r}, which transformers uses in "
                f"its place. Remove {usual}."
            )
    return rope(fields, theta=theta, partial_rotary_factor=fraction, head_dim=head_dim)


LAYER = "gpt_neox.layers.{i}"
FIXED: tuple[Rule, ...] = (
    rule("embedding.weight", "gpt_neox.embed_in.weight"),
    *layer_norm("norm", "gpt_neox.final_layer_norm"),
    rule("head.weight", "embed_out.weight", Transposed()),
    rule("head.weight", "lm_head.weight", Transposed()),
    *layer_norm("decoder.{i}.norm", f"{LAYER}.input_layernorm"),
    *layer_norm("decoder.{i}.attention_norm", f"{LAYER}.input_layernorm"),
    *layer_norm("decoder.{i}.ffn_norm", f"{LAYER}.post_attention_layernorm"),
    *linear("decoder.{i}.attention.projection", f"{LAYER}.attention.dense"),
    *linear("decoder.{i}.ffn.up", f"{LAYER}.mlp.dense_h_to_4h"),
    *linear("decoder.{i}.ffn.down", f"{LAYER}.mlp.dense_4h_to_h"),
)


def rules(cfg: Any) -> Sequence[Rule]:
    layer: Any = layers_of(cfg.decoder)[0].config
    fused = fused_qkv(f"{LAYER}.attention.query_key_value", ByHead(layer.attention.num_heads))
    return fixed((*FIXED, *fused), "gpt_neox.embed_in.weight")(cfg)


FAMILIES = (
    Family(
        "GPT-NeoX",
        ("gpt_neox",),
        gpt_neox,
        rules,
        ignored=(r".*\.attention\.(masked_)?bias", r".*rotary_emb\.inv_freq"),
        prefix="gpt_neox.",
        defaults={
            "vocab_size": 50_432,
            "hidden_size": 6144,
            "intermediate_size": 24_576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
            "tie_word_embeddings": False,
            **ROPE,
            "rope_theta": None,
            "hidden_act": "gelu",
            "rotary_emb_base": 10_000.0,
            "rotary_pct": 0.25,
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "use_parallel_residual": True,
        },
    ),
)
