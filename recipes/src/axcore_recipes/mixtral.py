"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Llama with a mixture of experts in every layer."""

from __future__ import annotations

import axcore as ax
from axcore.train import Trainer
from axcore_recipes.blocks import pretraining
from axcore_recipes.llama import llama


def mixtral_8x7b() -> Trainer.Config:
    """Mixtral 8x7B: 2 of 8 experts per token."""
    model = llama(
        dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, hidden_dim=14_336, vocab_size=32_000, theta=1_000_000.0
    )
    model = ax.pipe(model, ax.use("moe", num_experts=8, top_k=2, balance=0.02))
    return pretraining(model, seq_len=4096, batch_size=1024, steps=500_000)
