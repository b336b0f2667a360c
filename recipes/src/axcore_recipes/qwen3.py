"""Qwen3 models (Qwen team 2025, arXiv 2505.09388): QK norms, and a mixture of experts in the 30B model."""

from __future__ import annotations

import axcore as ax
from axcore.nn import Attention, CausalLM, FeedForward, RMSNorm, TransformerLayer
from axcore.train import Trainer
from axcore_recipes.blocks import causal_lm, pretraining


def qwen3(
    *, dim: int, num_layers: int, num_heads: int, num_kv_heads: int, hidden_dim: int, tied: bool = False
) -> CausalLM.Config:
    """A Qwen3 decoder: heads of 128 features, normalized queries and keys."""
    attention = Attention.Config(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        query_norm=RMSNorm.Config(),
        key_norm=RMSNorm.Config(),
    )
    layer = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=hidden_dim))
    model = causal_lm([layer] * num_layers, dim=dim, vocab_size=151_936, eps=1e-6, tied=tied)
    return ax.pipe(model, ax.use("rope", theta=1_000_000.0))


def qwen3_0_6b() -> Trainer.Config:
    """Qwen3 0.6B, with tied embedding and head."""
    model = qwen3(dim=1024, num_layers=28, num_heads=16, num_kv_heads=8, hidden_dim=3072, tied=True)
    return pretraining(model, seq_len=4096, batch_size=1024, steps=1_000_000, loss_chunk=4096)


def qwen3_8b() -> Trainer.Config:
    """Qwen3 8B."""
    model = qwen3(dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, hidden_dim=12_288)
    return pretraining(model, seq_len=4096, batch_size=1024, steps=1_000_000, loss_chunk=4096)


def qwen3_30b_a3b() -> Trainer.Config:
    """Qwen3 30B, of which each token uses 3B: 8 of 128 experts in every layer, with global-batch load balancing."""
    model = qwen3(dim=2048, num_layers=48, num_heads=32, num_kv_heads=4, hidden_dim=768)
    model = ax.pipe(model, ax.use("moe", num_experts=128, top_k=8, balance=1e-3))
    return pretraining(model, seq_len=4096, batch_size=1024, steps=1_000_000, loss_chunk=4096)
