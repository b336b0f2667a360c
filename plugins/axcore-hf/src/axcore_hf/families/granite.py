"""Granite: Llama with factors of embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from typing import Any

from axcore.nn import Embedding
from axcore_hf.families.llama import RULES
from axcore_hf.families.rope import ROPE
from axcore_hf.families.shared import attention, causal_lm, feed_forward, fixed, pre_norm, sizes
from axcore_hf.family import Family
from axcore_hf.fields import Fields


def granite(fields: Fields) -> Any:
    mixer = attention(fields, scale=fields("attention_multiplier"))
    layer = pre_norm(fields, mixer, feed_forward(fields, bias=fields("mlp_bias")))
    return causal_lm(
        fields,
        [layer.set(residual_scale=fields("residual_multiplier"))] * fields("num_hidden_layers"),
        embedding=Embedding.Config(scale=fields("embedding_multiplier")),
        logit_scale=1 / fields("logits_scaling"),
    )


FAMILIES = (
    Family(
        "Granite",
        ("granite",),
        granite,
        fixed(RULES),
        defaults={
            **sizes(vocab=32_000, hidden=4096, intermediate=11_008, layers=32, heads=32),
            **ROPE,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        no_effect={"partial_rotary_factor"},
    ),
)
