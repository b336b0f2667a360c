"""Qwen 2 and 3."""

from __future__ import annotations

from typing import Any

from axcore.nn import FeedForward
from axcore_hf.families.llama import RULES
from axcore_hf.families.shared import (
    activation,
    attention,
    causal_lm,
    experts,
    feed_forward,
    fixed,
    norm,
    pre_norm,
    sliding,
    window,
)
from axcore_hf.family import Family
from axcore_hf.fields import Fields
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.router import TopK


def _windows(fields: Fields) -> list[int | None]:
    """The window of each layer."""
    count, size = fields("num_hidden_layers"), fields("sliding_window", None)
    used = fields("use_sliding_window", False)
    full = fields("max_window_layers", count)
    late = [number >= full for number in range(count)]
    return [size if used and is_sliding else None for is_sliding in sliding(fields, late)]


def qwen2(fields: Fields) -> Any:
    def layer(size: int | None) -> Any:
        mixer = attention(fields, bias=True, output_bias=False, mask=window(size))
        return pre_norm(fields, mixer, feed_forward(fields))

    return causal_lm(fields, [layer(size) for size in _windows(fields)])


def qwen3(fields: Fields) -> Any:
    plain = feed_forward(fields)
    return causal_lm(fields, [pre_norm(fields, _normed(fields, size), plain) for size in _windows(fields)])


def qwen3_moe(fields: Fields) -> Any:
    step, dense = fields("decoder_sparse_step", 1), fields("mlp_only_layers", [])
    block = FeedForward.Config(hidden_dim=fields("moe_intermediate_size"), activation=activation(fields))
    mixture = MoE.Config(
        num_experts=fields("num_experts", None) or fields("num_local_experts"),
        router=TopK.Config(top_k=fields("num_experts_per_tok"), normalize=bool(fields("norm_topk_prob", False))),
        experts=Experts.Config(block=block),
    )
    fields("max_window_layers", None)  # all layers have the same window, or none
    size = fields("sliding_window", None) if fields("use_sliding_window", False) else None
    plain = feed_forward(fields)

    def is_sparse(number: int) -> bool:
        return number not in dense and (number + 1) % step == 0

    numbers = range(fields("num_hidden_layers"))
    mixer = _normed(fields, size)
    return causal_lm(fields, [pre_norm(fields, mixer, mixture if is_sparse(each) else plain) for each in numbers])


def _normed(fields: Fields, size: int | None) -> Any:
    return attention(fields, query_norm=norm(fields), key_norm=norm(fields), mask=window(size))


MIXTURE = experts("mlp.gate", "mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj", "mlp.experts.{e}.down_proj")

FAMILIES = (
    Family("Qwen 2", ("qwen2",), qwen2, fixed(RULES)),
    Family("Qwen 3", ("qwen3",), qwen3, fixed(RULES)),
    Family("Qwen 3 MoE", ("qwen3_moe",), qwen3_moe, fixed((*RULES, *MIXTURE))),
)
