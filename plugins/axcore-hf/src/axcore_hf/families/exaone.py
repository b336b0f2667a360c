"""EXAONE 4: norms after each block, and sliding windows. In models with windows, global layers have no RoPE."""

from __future__ import annotations

from typing import Any

from axcore_hf.families.rope import ROPE, rope
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    MLP,
    OUTPUT_NORMS,
    attention,
    causal_lm,
    fixed,
    norm,
    post_norm,
    sizes,
    sliding_by_pattern,
    window,
    windows,
)
from axcore_hf.family import Family
from axcore_hf.fields import Fields, OrNull


def exaone4(fields: Fields) -> Any:
    size, position = fields("sliding_window"), rope(fields)

    def layer(local: int | None) -> Any:
        mixer = attention(
            fields,
            bias=False,
            query_norm=norm(fields),
            key_norm=norm(fields),
            mask=window(local),
            position=position if local == size else None,
        )
        return post_norm(fields, mixer)

    return causal_lm(fields, [layer(local) for local in windows(fields, size, sliding_by_pattern(fields))])


FAMILIES = (
    Family(
        "EXAONE 4",
        ("exaone4",),
        exaone4,
        fixed((*EMBEDDINGS, *ATTENTION, *MLP, *OUTPUT_NORMS)),
        defaults={
            **sizes(vocab=102_400, hidden=4096, intermediate=16_384, layers=32, heads=32),
            **ROPE,
            "num_key_value_heads": 32,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": OrNull(4096),
            "sliding_window_pattern": OrNull(4),
            "layer_types": None,
        },
        no_effect={"attention_bias", "mlp_bias", "partial_rotary_factor"},
    ),
)
