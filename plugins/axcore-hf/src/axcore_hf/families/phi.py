"""Phi, with attention and feed-forward block in parallel; Phi-3, with queries, keys and values in one tensor."""

from __future__ import annotations

from typing import Any

from axcore.config import ConfigError
from axcore.nn import LayerNorm, Linear, ParallelLayer
from axcore_hf.families.rope import ROPE, head_dim, rope
from axcore_hf.families.shared import (
    EMBEDDINGS,
    FUSED_MLP,
    LAYER,
    NORMS,
    attention,
    causal_lm,
    feed_forward,
    fixed,
    fused_qkv,
    layer_norm,
    linear,
    pre_norm,
    sizes,
    window,
)
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields
from axcore_hf.transforms import Fused


def phi(fields: Fields) -> Any:
    fields.only("tie_word_embeddings", False)  # the head has a bias
    norm = LayerNorm.Config(eps=fields("layer_norm_eps"))
    of_heads = None
    if fields("qk_layernorm"):
        of_heads, dim, heads = norm, fields("hidden_size"), fields("num_attention_heads")
        if head_dim(fields) != dim // heads:
            raise ConfigError(
                f"{fields.where}: qk_layernorm requires head_dim to be hidden_size // num_attention_heads = "
                f"{dim // heads}, got {head_dim(fields)}"
            )
    layer = ParallelLayer.Config(
        norm=norm,
        attention=attention(fields, bias=True, query_norm=of_heads, key_norm=of_heads),
        ffn=feed_forward(fields, bias=True, gate=None),
    )
    model = causal_lm(fields, [layer] * fields("num_hidden_layers"), norm=norm)
    return model.set(head=Linear.Config(use_bias=True))


def phi3(fields: Fields) -> Any:
    position = rope(fields, types=("default", "longrope", "su"))
    mixer = attention(fields, bias=False, position=position, mask=window(fields("sliding_window")))
    return causal_lm(fields, [pre_norm(fields, mixer, feed_forward(fields))] * fields("num_hidden_layers"))


PARALLEL = (
    rule("embedding.weight", "model.embed_tokens.weight"),
    *layer_norm("norm", "model.final_layernorm"),
    *linear("head", "lm_head"),
    *layer_norm("decoder.{i}.norm", f"{LAYER}.input_layernorm"),
    *linear("decoder.{i}.attention.query", f"{LAYER}.self_attn.q_proj"),
    *linear("decoder.{i}.attention.key", f"{LAYER}.self_attn.k_proj"),
    *linear("decoder.{i}.attention.value", f"{LAYER}.self_attn.v_proj"),
    *linear("decoder.{i}.attention.projection", f"{LAYER}.self_attn.dense"),
    *layer_norm("decoder.{i}.attention.query_norm", f"{LAYER}.self_attn.q_layernorm"),
    *layer_norm("decoder.{i}.attention.key_norm", f"{LAYER}.self_attn.k_layernorm"),
    *linear("decoder.{i}.ffn.up", f"{LAYER}.mlp.fc1"),
    *linear("decoder.{i}.ffn.down", f"{LAYER}.mlp.fc2"),
)
RULES = (
    *EMBEDDINGS,
    *NORMS,
    *FUSED_MLP,
    *linear("decoder.{i}.attention.projection", f"{LAYER}.self_attn.o_proj"),
    *fused_qkv(f"{LAYER}.self_attn.qkv_proj", Fused()),
)

FAMILIES = (
    Family(
        "Phi",
        ("phi",),
        phi,
        fixed(PARALLEL),
        defaults={
            **sizes(vocab=51_200, hidden=2048, intermediate=8192, layers=24, heads=32),
            **ROPE,
            "partial_rotary_factor": 0.5,
            "hidden_act": "gelu_new",
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "qk_layernorm": False,
        },
        no_effect={"attention_bias", "mlp_bias"},
    ),
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
