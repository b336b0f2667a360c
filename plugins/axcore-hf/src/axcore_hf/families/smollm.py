"""SmolLM3: Llama without RoPE in some layers."""

from __future__ import annotations

from typing import Any

from axcore.config import ConfigError
from axcore_hf.families.llama import RULES
from axcore_hf.families.rope import ROPE, rope
from axcore_hf.families.shared import (
    attention,
    causal_lm,
    feed_forward,
    fixed,
    pre_norm,
    sizes,
    sliding,
    window,
    window_size,
    windows,
)
from axcore_hf.family import Family
from axcore_hf.fields import Fields, OrNull


def smollm3(fields: Fields) -> Any:
    count, interval, have_rope = fields("num_hidden_layers"), fields("no_rope_layer_interval"), fields("no_rope_layers")
    if have_rope is None:
        have_rope = [(number + 1) % interval != 0 for number in range(count)]
    if len(have_rope) < count:
        raise ConfigError(f"{fields.where}: no_rope_layers lists {len(have_rope)} layers, but the model has {count}")
    size = window_size(fields)
    are_sliding = sliding(fields, [size is not None and not has_rope for has_rope in have_rope[:count]])
    position, block = rope(fields), feed_forward(fields, bias=fields("mlp_bias"))
    mixers = [
        attention(fields, mask=window(local), position=position if has_rope else None)
        for local, has_rope in zip(windows(fields, size, are_sliding), have_rope, strict=False)
    ]
    return causal_lm(fields, [pre_norm(fields, mixer, block) for mixer in mixers])


FAMILIES = (
    Family(
        "SmolLM3",
        ("smollm3",),
        smollm3,
        fixed(RULES),
        defaults={
            **sizes(vocab=128_256, hidden=2048, intermediate=11_008, layers=36, heads=16),
            **ROPE,
            "rope_theta": 2e6,
            "num_key_value_heads": OrNull(4),
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
        no_effect={"max_window_layers", "partial_rotary_factor"},
    ),
)
