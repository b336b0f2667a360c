"""Gemma 1 and 2, and the text models of Gemma 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from axcore.nn import Embedding, TransformerLayer
from axcore_hf.families.rope import ROPE, by_layer_type, rope
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    MLP,
    NORMS,
    activation,
    attention,
    causal_lm,
    check_heads,
    feed_forward,
    fixed,
    norm,
    pre_norm,
    sizes,
    sliding,
    sliding_by_pattern,
    window,
)
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields, OrNull


def gemma(fields: Fields) -> Any:
    fields.only("use_bidirectional_attention", None, False)
    # transformers reads "gelu" as its approximation
    function = jax.nn.gelu if fields("hidden_act") == "gelu" else activation(fields)
    zero_centred = norm(fields, zero_centred=True)
    layer = pre_norm(fields, attention(fields), feed_forward(fields, activation=function), zero_centred)
    return _causal_lm(fields, [layer] * fields("num_hidden_layers"))


def _causal_lm(fields: Fields, layers: list[TransformerLayer.Config], **more: Any) -> Any:
    embedding = Embedding.Config(scale=math.sqrt(fields("hidden_size")))
    return causal_lm(fields, layers, norm=norm(fields, zero_centred=True), embedding=embedding, **more)


def _model(fields: Fields, is_sliding: list[bool], positions: Mapping[bool, Any], **more: Any) -> Any:
    """Args: positions: of local and other layers. more: arguments of attention."""
    check_heads(fields)
    zero_centred = norm(fields, zero_centred=True)
    gelu = activation(fields, "hidden_activation")
    size = fields("sliding_window")
    fields.only("use_bidirectional_attention", None, False)

    def layer(local: bool) -> TransformerLayer.Config:
        mixer = attention(
            fields,
            mask=window(size if local else None),
            position=positions[local],
            scale=1 / math.sqrt(fields("query_pre_attn_scalar")),
            **more,
        )
        return TransformerLayer.Config(
            attention_norm=zero_centred,
            attention=mixer,
            attention_output_norm=zero_centred,
            ffn_norm=zero_centred,
            ffn=feed_forward(fields, activation=gelu),
            ffn_output_norm=zero_centred,
        )

    return _causal_lm(fields, [layer(local) for local in is_sliding], softcap=fields("final_logit_softcapping"))


def gemma2(fields: Fields) -> Any:
    every_second = [number % 2 == 0 for number in range(fields("num_hidden_layers"))]
    position = rope(fields)
    return _model(
        fields,
        sliding(fields, every_second),
        {True: position, False: position},
        softcap=fields("attn_logit_softcapping"),
    )


def gemma3(fields: Fields) -> Any:
    normed = norm(fields, zero_centred=True)
    positions = by_layer_type(fields, fields("rope_local_base_freq"))
    return _model(fields, sliding_by_pattern(fields), positions, query_norm=normed, key_norm=normed)


PLAIN = (*EMBEDDINGS, *ATTENTION, *MLP)
RULES = (
    *PLAIN,
    rule("decoder.{i}.attention_norm.scale", f"{LAYER}.input_layernorm.weight"),
    rule("decoder.{i}.attention_output_norm.scale", f"{LAYER}.post_attention_layernorm.weight"),
    rule("decoder.{i}.ffn_norm.scale", f"{LAYER}.pre_feedforward_layernorm.weight"),
    rule("decoder.{i}.ffn_output_norm.scale", f"{LAYER}.post_feedforward_layernorm.weight"),
)

SHARED = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}

FAMILIES = (
    Family(
        "Gemma",
        ("gemma",),
        gemma,
        fixed((*PLAIN, *NORMS)),
        defaults={
            **sizes(vocab=256_000, hidden=3072, intermediate=24_576, layers=28, heads=16),
            **ROPE,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "use_bidirectional_attention": None,
        },
        no_effect={"hidden_activation", "mlp_bias", "partial_rotary_factor"},
    ),
    Family(
        "Gemma 2",
        ("gemma2",),
        gemma2,
        fixed(RULES),
        defaults={
            **sizes(vocab=256_000, hidden=2304, intermediate=9216, layers=26, heads=8),
            **ROPE,
            **SHARED,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": OrNull(30.0),
            "attn_logit_softcapping": OrNull(50.0),
            "use_bidirectional_attention": None,
        },
        no_effect={"hidden_act", "mlp_bias", "partial_rotary_factor"},
    ),
    Family(
        "Gemma 3",
        ("gemma3_text",),
        gemma3,
        fixed(RULES),
        defaults={
            **sizes(vocab=262_208, hidden=2304, intermediate=9216, layers=26, heads=8),
            **SHARED,
            "max_position_embeddings": 131_072,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": OrNull(False),
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_parameters": None,
            "rope_scaling": None,
            "rope_local_base_freq": 1e4,
        },
        no_effect={
            "_sliding_window_pattern",
            "attn_logit_softcapping",
            "hidden_act",
            "mlp_bias",
            "partial_rotary_factor",
        },
    ),
)
