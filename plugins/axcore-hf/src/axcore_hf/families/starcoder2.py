"""StarCoder2: LayerNorm, a plain feed-forward block, biases everywhere."""

from __future__ import annotations

from typing import Any

from axcore.nn import LayerNorm
from axcore_hf.families.rope import ROPE
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    LAYER,
    LAYER_NORMS,
    attention,
    causal_lm,
    feed_forward,
    fixed,
    linear,
    pre_norm,
    sizes,
    window,
)
from axcore_hf.family import Family
from axcore_hf.fields import Fields


def starcoder2(fields: Fields) -> Any:
    biased, norm = fields("use_bias"), LayerNorm.Config(eps=fields("norm_epsilon"))
    mixer = attention(fields, bias=biased, mask=window(fields("sliding_window")))
    layer = pre_norm(fields, mixer, feed_forward(fields, bias=biased, gate=None), norm)
    return causal_lm(fields, [layer] * fields("num_hidden_layers"), norm=norm)


RULES = (
    *EMBEDDINGS,
    *LAYER_NORMS,
    *ATTENTION,
    *linear("decoder.{i}.ffn.up", f"{LAYER}.mlp.c_fc"),
    *linear("decoder.{i}.ffn.down", f"{LAYER}.mlp.c_proj"),
)

FAMILIES = (
    Family(
        "StarCoder2",
        ("starcoder2",),
        starcoder2,
        fixed(RULES),
        defaults={
            **sizes(vocab=49_152, hidden=3072, intermediate=12_288, layers=30, heads=24),
            **ROPE,
            "hidden_act": "gelu_pytorch_tanh",
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "sliding_window": None,
            "tie_word_embeddings": True,
        },
        no_effect={"attention_bias", "mlp_bias", "mlp_type", "norm_type", "partial_rotary_factor"},
    ),
)
