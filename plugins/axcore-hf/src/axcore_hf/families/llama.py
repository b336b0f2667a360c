"""Llama and similar models: Llama 2 and 3, SmolLM, Mistral, Mixtral."""

from __future__ import annotations

from typing import Any

from axcore_hf.families.rope import ROPE, ROPE_TYPES, rope
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    MLP,
    NORMS,
    attention,
    causal_lm,
    check_heads,
    experts,
    feed_forward,
    fixed,
    mixture,
    pre_norm,
    sizes,
    window,
)
from axcore_hf.family import Family
from axcore_hf.fields import Fields, OrNull

RULES = (*EMBEDDINGS, *NORMS, *ATTENTION, *MLP)


def llama(fields: Fields) -> Any:
    check_heads(fields)
    block = feed_forward(fields, bias=fields("mlp_bias"))
    return causal_lm(fields, [pre_norm(fields, attention(fields), block)] * fields("num_hidden_layers"))


def mistral(fields: Fields) -> Any:
    mixer = attention(fields, bias=False, mask=window(fields("sliding_window")))
    return causal_lm(fields, [pre_norm(fields, mixer, feed_forward(fields))] * fields("num_hidden_layers"))


def mixtral(fields: Fields) -> Any:
    # transformers requires head_dim for the other types
    types = ROPE_TYPES if fields("head_dim") is not None else ("default", "linear", "llama3")
    mixer = attention(fields, bias=False, position=rope(fields, types=types), mask=window(fields("sliding_window")))
    block = mixture(fields, feed_forward(fields), "num_local_experts")
    return causal_lm(fields, [pre_norm(fields, mixer, block)] * fields("num_hidden_layers"))


MIXTURE = experts(
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{e}.w1",
    "block_sparse_moe.experts.{e}.w3",
    "block_sparse_moe.experts.{e}.w2",
)

LLAMA = Family(
    "Llama",
    ("llama",),
    llama,
    fixed(RULES),
    defaults={
        **sizes(vocab=32_000, hidden=4096, intermediate=11_008, layers=32, heads=32),
        **ROPE,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
    },
    no_effect={"is_llama_config", "partial_rotary_factor", "rope_interleaved"},
)
MISTRAL = Family(
    "Mistral",
    ("mistral",),
    mistral,
    fixed(RULES),
    defaults={
        **sizes(vocab=32_000, hidden=4096, intermediate=14_336, layers=32, heads=32),
        **ROPE,
        "head_dim": None,
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": OrNull(4096),
    },
    no_effect={"attention_bias", "mlp_bias", "partial_rotary_factor"},
)
MIXTRAL = Family(
    "Mixtral",
    ("mixtral",),
    mixtral,
    fixed((*RULES, *MIXTURE)),
    defaults={
        **sizes(vocab=32_000, hidden=4096, intermediate=14_336, layers=32, heads=32),
        **ROPE,
        "head_dim": None,
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    no_effect={
        "attention_bias",
        "mlp_bias",
        "output_router_logits",
        "partial_rotary_factor",
        "router_aux_loss_coef",
        "router_jitter_noise",
    },
    aliases={"num_experts": "num_local_experts"},
)

FAMILIES = (LLAMA, MISTRAL, MIXTRAL)
