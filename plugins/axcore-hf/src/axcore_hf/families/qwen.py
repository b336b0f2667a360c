"""Qwen 2 and 3, and their mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axcore.config import ConfigError
from axcore.nn import Linear
from axcore_hf.families.llama import RULES
from axcore_hf.families.rope import ROPE
from axcore_hf.families.shared import (
    LAYER,
    MIXTURE,
    attention,
    causal_lm,
    feed_forward,
    fixed,
    linear,
    mixture,
    norm,
    pre_norm,
    sizes,
    sliding,
    window,
    window_size,
    windows,
)
from axcore_hf.family import Family, Rule
from axcore_hf.fields import Fields, OrNull


def _windows(fields: Fields, is_sliding: Callable[[int], bool]) -> list[int | None]:
    """The window of each layer.

    Args:
        is_sliding: which layers of a config without `layer_types` have a window, if there is one.
    """
    size = window_size(fields)
    default = [size is not None and is_sliding(number) for number in range(fields("num_hidden_layers"))]
    return windows(fields, size, sliding(fields, default))


def _late(fields: Fields) -> list[int | None]:
    """The window of each layer. The first `max_window_layers` have none."""
    full = fields("max_window_layers")
    return _windows(fields, lambda number: number >= full)


def qwen2(fields: Fields) -> Any:
    def layer(size: int | None) -> Any:
        mixer = attention(fields, bias=True, output_bias=False, mask=window(size))
        return pre_norm(fields, mixer, feed_forward(fields))

    return causal_lm(fields, [layer(size) for size in _late(fields)])


def qwen3(fields: Fields) -> Any:
    plain = feed_forward(fields)
    return causal_lm(fields, [pre_norm(fields, _normed(fields, size), plain) for size in _late(fields)])


def qwen2_moe(fields: Fields) -> Any:
    early = fields("max_window_layers")
    windows = _windows(fields, lambda number: number < early and number % 2 == 0)
    if fields("use_sliding_window") and fields("sliding_window") is None:
        raise ConfigError(f"{fields.where}: use_sliding_window=true requires sliding_window")
    shared = feed_forward(fields, "shared_expert_intermediate_size")
    blocks = _blocks(fields, shared=shared, shared_gate=Linear.Config())

    def mixer(size: int | None) -> Any:
        return attention(fields, bias=fields("qkv_bias"), output_bias=False, mask=window(size))

    return causal_lm(
        fields, [pre_norm(fields, mixer(size), block) for size, block in zip(windows, blocks, strict=True)]
    )


def qwen3_moe(fields: Fields) -> Any:
    mixer = _normed(fields, window_size(fields))
    return causal_lm(fields, [pre_norm(fields, mixer, block) for block in _blocks(fields)])


def _blocks(fields: Fields, **more: Any) -> list[Any]:
    """The feed-forward block of each layer: a mixture of experts or a plain block.

    Args:
        more: options of the mixture.
    """
    step, dense = fields("decoder_sparse_step"), fields("mlp_only_layers") or []
    expert = feed_forward(fields, "moe_intermediate_size")
    sparse, plain = mixture(fields, expert, normalize=fields("norm_topk_prob"), **more), feed_forward(fields)

    def is_sparse(number: int) -> bool:
        return number not in dense and (number + 1) % step == 0

    return [sparse if is_sparse(number) else plain for number in range(fields("num_hidden_layers"))]


def _normed(fields: Fields, size: int | None) -> Any:
    return attention(fields, query_norm=norm(fields), key_norm=norm(fields), mask=window(size))


SHARED: tuple[Rule, ...] = (
    *linear("decoder.{i}.ffn.shared_block.gate", f"{LAYER}.mlp.shared_expert.gate_proj"),
    *linear("decoder.{i}.ffn.shared_block.up", f"{LAYER}.mlp.shared_expert.up_proj"),
    *linear("decoder.{i}.ffn.shared_block.down", f"{LAYER}.mlp.shared_expert.down_proj"),
    *linear("decoder.{i}.ffn.shared_gate", f"{LAYER}.mlp.shared_expert_gate"),
)

NO_EFFECT = {"mlp_bias", "partial_rotary_factor", "use_mrope"}
WINDOWS = {"use_sliding_window": False, "sliding_window": OrNull(4096)}
EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}

FAMILIES = (
    Family(
        "Qwen 2",
        ("qwen2",),
        qwen2,
        fixed(RULES),
        defaults={
            **sizes(vocab=151_936, hidden=4096, intermediate=22_016, layers=32, heads=32),
            **ROPE,
            "hidden_act": "silu",
            **WINDOWS,
            "num_key_value_heads": OrNull(32),
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "max_window_layers": 28,
            "layer_types": None,
        },
        no_effect=NO_EFFECT | {"attention_bias"},
    ),
    Family(
        "Qwen 2 MoE",
        ("qwen2_moe",),
        qwen2_moe,
        fixed((*RULES, *MIXTURE, *SHARED)),
        defaults={
            **sizes(vocab=151_936, hidden=2048, intermediate=5632, layers=24, heads=16),
            **ROPE,
            "hidden_act": "silu",
            **WINDOWS,
            **EXPERTS,
            "num_key_value_heads": 16,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "max_window_layers": 28,
            "layer_types": None,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "qkv_bias": True,
        },
        no_effect=NO_EFFECT | {"attention_bias", "output_router_logits", "router_aux_loss_coef"},
    ),
    Family(
        "Qwen 3",
        ("qwen3",),
        qwen3,
        fixed(RULES),
        defaults={
            **sizes(vocab=151_936, hidden=4096, intermediate=22_016, layers=32, heads=32),
            **ROPE,
            "hidden_act": "silu",
            **WINDOWS,
            "num_key_value_heads": OrNull(32),
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "max_window_layers": 28,
            "layer_types": None,
        },
        no_effect=NO_EFFECT,
    ),
    Family(
        "Qwen 3 MoE",
        ("qwen3_moe",),
        qwen3_moe,
        fixed((*RULES, *MIXTURE)),
        defaults={
            **sizes(vocab=151_936, hidden=2048, intermediate=6144, layers=24, heads=32),
            **ROPE,
            "hidden_act": "silu",
            **WINDOWS,
            **EXPERTS,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        no_effect=NO_EFFECT | {"max_window_layers", "output_router_logits", "router_aux_loss_coef"},
        aliases={"num_local_experts": "num_experts"},
    ),
)
