"""Gemma 2 and the text models of Gemma 3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from axcore.config import ConfigError
from axcore.nn import Embedding, TransformerLayer
from axcore_hf.families.rope import ROPE, ROPE_TYPES, rope, rotary
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    LAYER_TYPES,
    MLP,
    activation,
    attention,
    causal_lm,
    check_heads,
    feed_forward,
    fixed,
    norm,
    sizes,
    sliding,
    window,
)
from axcore_hf.family import Family, rule
from axcore_hf.fields import Fields, OrNull


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

    return causal_lm(
        fields,
        [layer(local) for local in is_sliding],
        norm=zero_centred,
        embedding=Embedding.Config(scale=math.sqrt(fields("hidden_size"))),
        softcap=fields("final_logit_softcapping"),
    )


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
    pattern = fields("sliding_window_pattern")
    most = [(number + 1) % pattern != 0 for number in range(fields("num_hidden_layers"))]
    normed = norm(fields, zero_centred=True)
    return _model(fields, sliding(fields, most), _positions(fields), query_norm=normed, key_norm=normed)


def _positions(fields: Fields) -> dict[bool, Any]:
    """RoPE of local and of other layers, which have bases of their own.

    Before version 5, `transformers` wrote the fields `rope_theta`, `rope_local_base_freq` and `rope_scaling`, the last
    of which applies to layers without a window.
    """
    parameters = dict(fields.optional("rope_parameters") or {})
    local, everywhere = (dict(parameters.pop(kind, None) or {"rope_type": "default"}) for kind in LAYER_TYPES)
    everywhere.update(fields.optional("rope_scaling") or {})
    everywhere.setdefault("rope_theta", fields("rope_theta"))
    local.setdefault("rope_theta", fields("rope_local_base_freq"))
    if not parameters.items() <= {"rope_type": "default", "rope_theta": everywhere["rope_theta"]}.items():
        raise ConfigError(
            f"{fields.where}: rope_parameters={parameters!r} must be inside the entries {' and '.join(LAYER_TYPES)}, "
            f"since transformers ignores them elsewhere"
        )
    fraction = {"partial_rotary_factor": fields.optional("partial_rotary_factor")}
    types = [kind for kind in ROPE_TYPES if kind != "yarn"]  # transformers ignores a `truncate` inside an entry
    return {
        is_local: rotary(fields, fraction | entry, types=types)
        for is_local, entry in ((True, local), (False, everywhere))
    }


RULES = (
    *EMBEDDINGS,
    *ATTENTION,
    *MLP,
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
