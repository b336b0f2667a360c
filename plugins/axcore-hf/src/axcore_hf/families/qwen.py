"""Qwen 2 and 3."""

from __future__ import annotations

from typing import Any

from axcore.config import ConfigError
from axcore.nn import FeedForward
from axcore_hf.families.llama import RULES
from axcore_hf.families.rope import ROPE
from axcore_hf.families.shared import (
    activation,
    attention,
    causal_lm,
    experts,
    feed_forward,
    fixed,
    norm,
    pre_norm,
    sizes,
    sliding,
    window,
)
from axcore_hf.family import Family
from axcore_hf.fields import Fields, OrNull
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.router import TopK


def _windows(fields: Fields) -> list[int | None]:
    """The window of each layer."""
    full, size = fields("max_window_layers"), _window(fields)
    late = [size is not None and number >= full for number in range(fields("num_hidden_layers"))]
    are_sliding = sliding(fields, late)
    if size is None and any(are_sliding):
        raise ConfigError(
            f"{fields.where}: layer_types has 'sliding_attention', which requires sliding_window and "
            f"use_sliding_window=true"
        )
    return [size if is_sliding else None for is_sliding in are_sliding]


def _window(fields: Fields) -> int | None:
    size: int | None = fields("sliding_window")
    return size if fields("use_sliding_window") else None


def qwen2(fields: Fields) -> Any:
    def layer(size: int | None) -> Any:
        mixer = attention(fields, bias=True, output_bias=False, mask=window(size))
        return pre_norm(fields, mixer, feed_forward(fields))

    return causal_lm(fields, [layer(size) for size in _windows(fields)])


def qwen3(fields: Fields) -> Any:
    plain = feed_forward(fields)
    return causal_lm(fields, [pre_norm(fields, _normed(fields, size), plain) for size in _windows(fields)])


def qwen3_moe(fields: Fields) -> Any:
    step, dense = fields("decoder_sparse_step"), fields("mlp_only_layers") or []
    block = FeedForward.Config(hidden_dim=fields("moe_intermediate_size"), activation=activation(fields))
    mixture = MoE.Config(
        num_experts=fields("num_experts"),
        router=TopK.Config(top_k=fields("num_experts_per_tok"), normalize=fields("norm_topk_prob")),
        experts=Experts.Config(block=block),
    )
    plain = feed_forward(fields)

    def is_sparse(number: int) -> bool:
        return number not in dense and (number + 1) % step == 0

    numbers = range(fields("num_hidden_layers"))
    mixer = _normed(fields, _window(fields))
    return causal_lm(fields, [pre_norm(fields, mixer, mixture if is_sparse(each) else plain) for each in numbers])


def _normed(fields: Fields, size: int | None) -> Any:
    return attention(fields, query_norm=norm(fields), key_norm=norm(fields), mask=window(size))


MIXTURE = experts("mlp.gate", "mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj", "mlp.experts.{e}.down_proj")

NO_EFFECT = {"mlp_bias", "partial_rotary_factor", "use_mrope"}
WINDOWS = {"use_sliding_window": False, "sliding_window": OrNull(4096)}

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
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        no_effect=NO_EFFECT | {"max_window_layers", "output_router_logits", "router_aux_loss_coef"},
        aliases={"num_local_experts": "num_experts"},
    ),
)
