"""OLMo 2 and 3, with norms after each block, and OLMoE; all normalize queries and keys over all heads."""

from __future__ import annotations

from typing import Any

from axcore.config import ConfigError
from axcore.nn import FullWidthNorm, TransformerLayer
from axcore_hf.families.rope import ROPE, by_layer_type, head_dim
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    MIXTURE,
    MLP,
    NORMS,
    OUTPUT_NORMS,
    attention,
    causal_lm,
    feed_forward,
    fixed,
    mixture,
    norm,
    post_norm,
    pre_norm,
    sizes,
    sliding,
    window,
    windows,
)
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields, OrNull


def _layer(fields: Fields, **more: Any) -> TransformerLayer.Config:
    """Args: more: arguments of attention."""
    qk_norm = FullWidthNorm.Config(norm=norm(fields))
    return post_norm(fields, attention(fields, query_norm=qk_norm, key_norm=qk_norm, **more))


def olmo2(fields: Fields) -> Any:
    return causal_lm(fields, [_layer(fields)] * fields("num_hidden_layers"))


def olmo3(fields: Fields) -> Any:
    most = [(number + 1) % 4 != 0 for number in range(fields("num_hidden_layers"))]
    positions = by_layer_type(fields, THETA)
    if fields("rope_theta") != THETA and positions[True].theta == THETA:
        raise ConfigError(
            f"{fields.where}: rope_theta={fields('rope_theta')!r} applies only to layers without a window in "
            f"transformers. Write rope_parameters, with an entry for each layer type, instead."
        )

    def layer(size: int | None) -> Any:
        return _layer(fields, mask=window(size), position=positions[size is not None])

    return causal_lm(fields, [layer(size) for size in windows(fields, fields("sliding_window"), sliding(fields, most))])


def olmoe(fields: Fields) -> Any:
    dim, heads = fields("hidden_size"), fields("num_attention_heads")
    if heads * head_dim(fields) != dim:
        raise ConfigError(
            f"{fields.where}: hidden_size={dim} must be num_attention_heads={heads} times the head_dim, which is "
            f"{head_dim(fields)}"
        )
    fields.only("clip_qkv", None)
    qk_norm = FullWidthNorm.Config(norm=norm(fields))
    block = mixture(fields, feed_forward(fields), normalize=fields("norm_topk_prob"))
    layer = pre_norm(fields, attention(fields, query_norm=qk_norm, key_norm=qk_norm), block)
    return causal_lm(fields, [layer] * fields("num_hidden_layers"))


THETA = 500_000.0
ACROSS = (
    *EMBEDDINGS,
    *ATTENTION,
    rule("decoder.{i}.attention.query_norm.norm.scale", f"{LAYER}.self_attn.q_norm.weight"),
    rule("decoder.{i}.attention.key_norm.norm.scale", f"{LAYER}.self_attn.k_norm.weight"),
)
RULES = (*ACROSS, *MLP, *OUTPUT_NORMS)

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
    Family(
        "OLMo 3",
        ("olmo3",),
        olmo3,
        fixed(RULES),
        defaults={
            **sizes(vocab=50_304, hidden=4096, intermediate=11_008, layers=32, heads=32),
            "rope_theta": THETA,
            "rope_parameters": None,
            "rope_scaling": None,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "sliding_window": OrNull(4096),
            "layer_types": None,
        },
        no_effect={"mlp_bias", "partial_rotary_factor"},
    ),
    Family(
        "OLMoE",
        ("olmoe",),
        olmoe,
        fixed((*ACROSS, *NORMS, *MIXTURE)),
        defaults={
            **sizes(vocab=50_304, hidden=2048, intermediate=2048, layers=16, heads=16),
            **ROPE,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "clip_qkv": None,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        no_effect={"mlp_bias", "output_router_logits", "partial_rotary_factor", "router_aux_loss_coef"},
        aliases={"num_local_experts": "num_experts"},
    ),
)
