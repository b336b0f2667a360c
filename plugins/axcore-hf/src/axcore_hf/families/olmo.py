"""OLMo 2, with norms after each block, and OLMoE; both normalize queries and keys over all heads."""

from __future__ import annotations

from typing import Any

from axcore.config import ConfigError
from axcore.nn import AcrossHeads, TransformerLayer
from axcore_hf.families.rope import ROPE, head_dim
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    MIXTURE,
    MLP,
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
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.router import TopK


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


def olmoe(fields: Fields) -> Any:
    dim, heads = fields("hidden_size"), fields("num_attention_heads")
    if heads * head_dim(fields) != dim:
        raise ConfigError(
            f"{fields.where}: hidden_size={dim} must be num_attention_heads={heads} times the head_dim, which is "
            f"{head_dim(fields)}"
        )
    fields.only("clip_qkv", None)
    across = AcrossHeads.Config(norm=norm(fields))
    mixture = MoE.Config(
        num_experts=fields("num_experts"),
        router=TopK.Config(top_k=fields("num_experts_per_tok"), normalize=fields("norm_topk_prob")),
        experts=Experts.Config(block=feed_forward(fields)),
    )
    layer = pre_norm(fields, attention(fields, query_norm=across, key_norm=across), mixture)
    return causal_lm(fields, [layer] * fields("num_hidden_layers"))


ACROSS = (
    *EMBEDDINGS,
    *ATTENTION,
    rule("decoder.{i}.attention.query_norm.norm.scale", f"{LAYER}.self_attn.q_norm.weight"),
    rule("decoder.{i}.attention.key_norm.norm.scale", f"{LAYER}.self_attn.k_norm.weight"),
)
RULES = (
    *ACROSS,
    *MLP,
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
