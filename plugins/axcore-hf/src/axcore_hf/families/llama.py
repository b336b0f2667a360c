"""Llama and similar models: Llama 2 and 3, SmolLM, Mistral, Mixtral."""

from __future__ import annotations

from typing import Any

from axcore.nn import FeedForward
from axcore_hf.families.shared import (
    ATTENTION,
    EMBEDDINGS,
    MLP,
    NORMS,
    activation,
    attention,
    causal_lm,
    experts,
    feed_forward,
    fixed,
    pre_norm,
    rope,
    window,
)
from axcore_hf.family import Family
from axcore_hf.fields import Fields
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.router import TopK

RULES = (*EMBEDDINGS, *NORMS, *ATTENTION, *MLP)


def llama(fields: Fields) -> Any:
    mixer = attention(fields, position=rope(fields, theta=10_000.0))  # Llama 2 configs lack rope_theta
    return causal_lm(fields, [pre_norm(fields, mixer, feed_forward(fields))] * fields("num_hidden_layers"))


def mistral(fields: Fields) -> Any:
    mixer = attention(fields, bias=False, mask=window(fields("sliding_window", None)))
    return causal_lm(fields, [pre_norm(fields, mixer, feed_forward(fields))] * fields("num_hidden_layers"))


def mixtral(fields: Fields) -> Any:
    mixer = attention(fields, bias=False, mask=window(fields("sliding_window", None)))
    block = FeedForward.Config(hidden_dim=fields("intermediate_size"), activation=activation(fields))
    mixture = MoE.Config(
        num_experts=fields("num_local_experts"),
        router=TopK.Config(top_k=fields("num_experts_per_tok")),
        experts=Experts.Config(block=block),
    )
    return causal_lm(fields, [pre_norm(fields, mixer, mixture)] * fields("num_hidden_layers"))


MIXTURE = experts(
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{e}.w1",
    "block_sparse_moe.experts.{e}.w3",
    "block_sparse_moe.experts.{e}.w2",
)

FAMILIES = (
    Family("Llama", ("llama",), llama, fixed(RULES)),
    Family("Mistral", ("mistral",), mistral, fixed(RULES)),
    Family("Mixtral", ("mixtral",), mixtral, fixed((*RULES, *MIXTURE))),
)
