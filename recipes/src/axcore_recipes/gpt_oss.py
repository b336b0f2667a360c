"""gpt-oss (OpenAI 2025, arXiv 2508.10925): attention sinks, a window in every second layer, experts with biases."""

from __future__ import annotations

import axcore as ax
from axcore.nn import (
    Attention,
    Causal,
    ClampedSwiGLU,
    FeedForward,
    Linear,
    Mask,
    SameSegment,
    SlidingWindow,
    TransformerLayer,
    Zeros,
)
from axcore.train import Trainer
from axcore_recipes.blocks import causal_lm, pretraining

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


def gpt_oss_20b() -> Trainer.Config:
    """20.9B parameters, of which each token uses 3.6B: 4 of 32 experts."""
    biased = Linear.Config(use_bias=True)

    def layer(mask: Mask) -> TransformerLayer.Config:
        attention = Attention.Config(
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            query=biased,
            key=biased,
            value=biased,
            projection=biased,
            sinks=Zeros(),
            mask=mask,
        )
        ffn = FeedForward.Config(hidden_dim=2880, gate=biased, up=biased, down=biased, gating=ClampedSwiGLU())
        return TransformerLayer.Config(attention=attention, ffn=ffn)

    every = Causal() & SameSegment()
    local, far = layer(every & SlidingWindow(size=128)), layer(every)
    model = causal_lm([local, far] * 12, dim=2880, vocab_size=201_088)
    model = ax.pipe(
        model,
        ax.use("rope", theta=150_000.0, scaling=YARN),
        ax.use("moe", num_experts=32, top_k=4, router_bias=True, balance=1e-3),
    )
    return pretraining(model, seq_len=4096, batch_size=1024, steps=500_000, loss_chunk=2048)
