"""Gemma 2 and the text models of Gemma 3."""

from __future__ import annotations

import math
from typing import Any

from axcore.nn import Embedding, TransformerLayer
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    MLP,
    activation,
    attention,
    causal_lm,
    feed_forward,
    fixed,
    norm,
    rope,
    sliding,
    window,
)
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields


def _model(fields: Fields, is_sliding: list[bool], norms: dict[str, Any], two_bases: bool) -> Any:
    zero_centred = norm(fields, zero_centred=True)
    gelu = activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    fields("hidden_act", None)
    fields.only("use_bidirectional_attention", None, False)

    def layer(local: bool) -> TransformerLayer.Config:
        kind = ("sliding_attention" if local else "full_attention") if two_bases else None
        mixer = attention(
            fields,
            mask=window(fields("sliding_window") if local else None),
            position=_position(fields, kind),
            scale=1 / math.sqrt(fields("query_pre_attn_scalar")),
            softcap=fields("attn_logit_softcapping", None),
            **norms,
        )
        return TransformerLayer.Config(
            attention_norm=zero_centred,
            attention=mixer,
            attention_output_norm=zero_centred,
            ffn_norm=zero_centred,
            ffn=feed_forward(fields, activation=gelu),
            ffn_output_norm=zero_centred,
        )

    return causal_lm(
        fields,
        [layer(local) for local in is_sliding],
        tied=True,
        norm=zero_centred,
        embedding=Embedding.Config(scale=math.sqrt(fields("hidden_size"))),
        softcap=fields("final_logit_softcapping", None),
    )


def _position(fields: Fields, kind: str | None) -> Any:
    local_base = fields("rope_local_base_freq", None)  # before transformers 5
    if kind == "sliding_attention" and local_base is not None and "rope_parameters" not in fields.raw:
        return rope(Fields({**fields.raw, "rope_theta": local_base, "rope_scaling": None}))
    return rope(fields, kind)


def gemma2(fields: Fields) -> Any:
    every_second = [number % 2 == 0 for number in range(fields("num_hidden_layers"))]
    return _model(fields, sliding(fields, every_second), {}, two_bases=False)


def gemma3(fields: Fields) -> Any:
    pattern = fields("sliding_window_pattern", 6)
    most = [(number + 1) % pattern != 0 for number in range(fields("num_hidden_layers"))]
    normed = norm(fields, zero_centred=True)
    return _model(fields, sliding(fields, most), {"query_norm": normed, "key_norm": normed}, two_bases=True)


RULES = (
    *EMBEDDINGS,
    *ATTENTION,
    *MLP,
    rule("decoder.{i}.attention_norm.scale", f"{LAYER}.input_layernorm.weight"),
    rule("decoder.{i}.attention_output_norm.scale", f"{LAYER}.post_attention_layernorm.weight"),
    rule("decoder.{i}.ffn_norm.scale", f"{LAYER}.pre_feedforward_layernorm.weight"),
    rule("decoder.{i}.ffn_output_norm.scale", f"{LAYER}.post_feedforward_layernorm.weight"),
)

DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
"""Defaults of `Gemma3TextConfig`. The configs that Google published with 4 to 27 billion parameters rely on them."""

FAMILIES = (
    Family("Gemma 2", ("gemma2",), gemma2, fixed(RULES)),
    Family("Gemma 3", ("gemma3_text",), gemma3, fixed(RULES), defaults=DEFAULTS),
)
