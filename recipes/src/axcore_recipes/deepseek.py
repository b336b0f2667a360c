"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437): latent attention, 256 experts, multi-token prediction."""

from __future__ import annotations

import axcore as ax
from axcore.nn import FeedForward, LatentAttention, MultiTokenPrediction, TransformerLayer
from axcore.train import Trainer
from axcore_recipes.blocks import causal_lm, pretraining


def deepseek_v3() -> Trainer.Config:
    """671B parameters, of which each token uses 37B, and one multi-token prediction module."""
    attention = LatentAttention.Config(
        num_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, value_dim=128
    )
    dense = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=18_432))
    sparse = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=2048, tags=("experts",)))
    model = causal_lm(
        [dense] * 3 + [sparse] * 58,
        dim=7168,
        vocab_size=129_280,
        eps=1e-6,
        future=(MultiTokenPrediction.Config(layer=sparse),),
    )
    model = ax.pipe(
        model,
        ax.use("rope", theta=10_000.0, layout="interleaved"),
        ax.use(
            "moe",
            num_experts=256,
            top_k=8,
            score="sigmoid",
            scale=2.5,
            groups=8,
            top_groups=4,
            shared_experts=1,
            bias_rate=0.001,
            balance=1e-4,
            balance_scope="sequence",
            where=ax.tagged("experts"),
        ),
    )
    return pretraining(model, seq_len=4096, batch_size=15_360, steps=235_000, peak=2.2e-4, loss_chunk=4096)
