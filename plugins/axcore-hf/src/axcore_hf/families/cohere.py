"""Cohere (Command R, Aya) and Cohere 2: parallel blocks, interleaved RoPE, scaled logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axcore.nn import LayerNorm, ParallelLayer, PerHeadNorm, layers_of
from axcore_hf.families.rope import ROPE, rope
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    MLP,
    attention,
    causal_lm,
    feed_forward,
    fixed,
    sizes,
    sliding_by_pattern,
    window,
)
from axcore_hf.family import Family, Rule, rule
from axcore_hf.fields import Fields
from axcore_hf.transforms import Rows


def cohere(fields: Fields) -> Any:
    normed = PerHeadNorm.Config(norm=_norm(fields)) if fields("use_qk_norm") else None
    position = rope(fields, layout="interleaved")
    layer = _layer(fields, position=position, query_norm=normed, key_norm=normed)
    return _model(fields, [layer] * fields("num_hidden_layers"))


def cohere2(fields: Fields) -> Any:
    local = _layer(fields, position=rope(fields, layout="interleaved"), mask=window(fields("sliding_window")))
    everywhere = _layer(fields, position=None)
    return _model(fields, [local if is_local else everywhere for is_local in sliding_by_pattern(fields)])


def _norm(fields: Fields) -> LayerNorm.Config:
    return LayerNorm.Config(eps=fields("layer_norm_eps"), use_bias=False)


def _layer(fields: Fields, **more: Any) -> ParallelLayer.Config:
    """A layer; `more` are arguments of attention."""
    return ParallelLayer.Config(norm=_norm(fields), attention=attention(fields, **more), ffn=feed_forward(fields))


def _model(fields: Fields, layers: Sequence[ParallelLayer.Config]) -> Any:
    return causal_lm(fields, layers, norm=_norm(fields), logit_scale=fields("logit_scale"))


FIXED = (*EMBEDDINGS, *ATTENTION, *MLP, rule("decoder.{i}.norm.scale", f"{LAYER}.input_layernorm.weight"))


def rules(cfg: Any) -> Sequence[Rule]:
    layer: Any = layers_of(cfg.decoder)[0].config
    of_heads = (
        rule(f"decoder.{{i}}.attention.{ours}.norm.scale", f"{LAYER}.self_attn.{theirs}.weight", Rows(heads))
        for ours, theirs, heads in (
            ("query_norm", "q_norm", layer.attention.num_heads),
            ("key_norm", "k_norm", layer.attention.num_kv_heads),
        )
    )
    return fixed((*FIXED, *of_heads))(cfg)


DEFAULTS = {
    **sizes(vocab=256_000, hidden=8192, intermediate=22_528, layers=40, heads=64),
    **ROPE,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "attention_bias": False,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
NO_EFFECT = {"mlp_bias", "model_max_length", "partial_rotary_factor"}

FAMILIES = (
    Family(
        "Cohere",
        ("cohere",),
        cohere,
        rules,
        defaults={**DEFAULTS, "rope_theta": 500_000.0, "use_qk_norm": False},
        no_effect=NO_EFFECT,
    ),
    Family(
        "Cohere 2",
        ("cohere2",),
        cohere2,
        rules,
        defaults={**DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        no_effect=NO_EFFECT
        | {
            # transformers fixes what these fields of published configs say
            "layer_switch",
            "order_of_interleaved_layers",
            "position_embedding_type",
            "rotary_pct",
            "use_embedding_sharing",
            "use_gated_activation",
            "use_parallel_block",
            "use_parallel_embedding",
        },
    ),
)
