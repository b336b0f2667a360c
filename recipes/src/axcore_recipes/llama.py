"""Llama models (Touvron et al. 2023, arXiv 2302.13971 and 2307.09288; Llama team 2024, arXiv 2407.21783)."""

from __future__ import annotations

import axcore as ax
from axcore.nn import Attention, CausalLM, FeedForward, TransformerLayer
from axcore.train import Trainer
from axcore_recipes.blocks import causal_lm, pretraining


def llama(
    *, dim: int, num_layers: int, num_heads: int, num_kv_heads: int, hidden_dim: int, vocab_size: int, theta: float
) -> CausalLM.Config:
    """A Llama decoder: pre-norm, grouped-query attention, SwiGLU, RoPE."""
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=num_heads, num_kv_heads=num_kv_heads),
        ffn=FeedForward.Config(hidden_dim=hidden_dim),
    )
    model = causal_lm([layer] * num_layers, dim=dim, vocab_size=vocab_size)
    return ax.pipe(model, ax.use("rope", theta=theta))


def llama_1b() -> Trainer.Config:
    """1.1B parameters, 16 layers, grouped-query attention. It fits on one large accelerator."""
    model = llama(
        dim=2048, num_layers=16, num_heads=32, num_kv_heads=8, hidden_dim=8192, vocab_size=32_000, theta=10_000.0
    )
    return pretraining(model, seq_len=2048, batch_size=256, steps=100_000)


def llama2_7b() -> Trainer.Config:
    """Llama 2 7B with the hyperparameters of the paper (section 2.2): 4M tokens per step, 2T tokens."""
    model = llama(
        dim=4096, num_layers=32, num_heads=32, num_kv_heads=32, hidden_dim=11_008, vocab_size=32_000, theta=10_000.0
    )
    return pretraining(model, seq_len=4096, batch_size=1024, steps=500_000)


def llama2_13b() -> Trainer.Config:
    """Llama 2 13B, trained like Llama 2 7B."""
    model = llama(
        dim=5120, num_layers=40, num_heads=40, num_kv_heads=40, hidden_dim=13_824, vocab_size=32_000, theta=10_000.0
    )
    return pretraining(model, seq_len=4096, batch_size=1024, steps=500_000)


def llama2_70b() -> Trainer.Config:
    """Llama 2 70B: grouped-query attention, half the learning rate of Llama 2 7B."""
    model = llama(
        dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden_dim=28_672, vocab_size=32_000, theta=10_000.0
    )
    return pretraining(model, seq_len=4096, batch_size=1024, steps=500_000, peak=1.5e-4)


def llama3_8b() -> Trainer.Config:
    """Llama 3 8B: a larger vocabulary and RoPE base; 15T tokens, 8M per step."""
    model = llama(
        dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, hidden_dim=14_336, vocab_size=128_256, theta=500_000.0
    )
    return pretraining(model, seq_len=8192, batch_size=1024, steps=1_800_000, warmup_steps=8000, loss_chunk=4096)


def llama3_70b() -> Trainer.Config:
    """Llama 3 70B, with half the learning rate of Llama 3 8B."""
    model = llama(
        dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden_dim=28_672, vocab_size=128_256, theta=500_000.0
    )
    return pretraining(
        model, seq_len=8192, batch_size=1024, steps=1_800_000, warmup_steps=8000, peak=1.5e-4, loss_chunk=4096
    )
