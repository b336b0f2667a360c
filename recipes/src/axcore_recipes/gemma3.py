"""The text model of Gemma 3 (Gemma team 2025, arXiv 2503.19786): groups of five local layers and one global layer."""

from __future__ import annotations

import math

import jax

import axcore as ax
from axcore.nn import (
    Attention,
    Causal,
    CausalLM,
    FeedForward,
    Mask,
    RMSNorm,
    SameSegment,
    SlidingWindow,
    TransformerLayer,
)
from axcore.train import Trainer
from axcore_recipes.blocks import causal_lm, pretraining


def gemma3(
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    hidden_dim: int,
    vocab_size: int,
    window: int,
) -> CausalLM.Config:
    """A Gemma 3 decoder: sandwich norms, zero-centred scales, QK norms, a tied and scaled embedding."""
    norm = RMSNorm.Config(zero_centred=True)

    def layer(mask: Mask, tag: str) -> TransformerLayer.Config:
        attention = Attention.Config(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            query_norm=norm,
            key_norm=norm,
            mask=mask,
            tags=(tag,),
        )
        return TransformerLayer.Config(
            attention_norm=norm,
            attention=attention,
            attention_output_norm=norm,
            ffn_norm=norm,
            ffn=FeedForward.Config(hidden_dim=hidden_dim, activation=jax.nn.gelu),
            ffn_output_norm=norm,
        )

    every = Causal() & SameSegment()
    local, far = layer(every & SlidingWindow(size=window), "local"), layer(every, "global")
    layers = [far if number % 6 == 5 else local for number in range(num_layers)]
    model = causal_lm(layers, dim=dim, vocab_size=vocab_size, eps=1e-6, tied=True, norm=norm)
    model = ax.select(model, "embedding").set(scale=math.sqrt(dim))
    return ax.pipe(
        model,
        ax.use("rope", theta=10_000.0, where=ax.tagged("local")),
        ax.use("rope", theta=1_000_000.0, scaling={"rope_type": "linear", "factor": 8.0}, where=ax.tagged("global")),
    )


def gemma3_4b() -> Trainer.Config:
    """Gemma 3 4B."""
    model = gemma3(
        dim=2560,
        num_layers=34,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        hidden_dim=10_240,
        vocab_size=262_208,
        window=1024,
    )
    return pretraining(model, seq_len=32_768, batch_size=128, steps=1_000_000, loss_chunk=2048)
