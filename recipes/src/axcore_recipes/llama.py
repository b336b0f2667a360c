"""Llama models (Touvron et al. 2023, arXiv 2307.09288)."""

from __future__ import annotations

import jax.numpy as jnp

import axcore as ax
from axcore.nn import Attention, CausalLM, FeedForward, Linear, Normal, Repeat, TransformerLayer
from axcore.parallel import SaveNames
from axcore.train import AdamW, Learner, Trainer, WarmupCosine
from axcore.train.input import TextFiles, TextInput


def llama(
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    hidden_dim: int,
    vocab_size: int,
    seq_len: int,
    batch_size: int,
    peak: float,
    steps: int,
) -> Trainer.Config:
    """A Llama decoder and its pre-training: bfloat16 compute, float32 parameters, FSDP.

    The text and its tokenizer are REQUIRED: set `input.source.folder` and `input.tokenizer`.
    """
    linear = Linear.Config(init=Normal(stddev=0.02))
    layer = TransformerLayer.Config(
        attention=Attention.Config(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            query=linear,
            key=linear,
            value=linear,
            projection=linear,
        ),
        ffn=FeedForward.Config(hidden_dim=hidden_dim, gate=linear, up=linear, down=linear),
    )
    model = CausalLM.Config(
        vocab_size=vocab_size,
        dim=dim,
        dtypes=ax.DTypes(compute=jnp.bfloat16),
        decoder=Repeat.Config(
            num_layers=num_layers,
            layers=layer,
            remat=SaveNames(names=("query", "key", "value", "heads", "gate", "up")),
        ),
        head=linear,
    )
    cfg = Trainer.Config(
        model=model,
        input=TextInput.Config(
            source=TextFiles.Config(), tokenizer=ax.REQUIRED, seq_len=seq_len, batch_size=batch_size
        ),
        learner=Learner.Config(
            optimizer=AdamW.Config(b1=0.9, b2=0.95, weight_decay=0.1),
            schedule=WarmupCosine(peak=peak, warmup_steps=2000, final=0.1),
        ),
        mesh=ax.Mesh(shape={"data": 1, "fsdp": -1}),
        steps=steps,
    )
    return ax.pipe(cfg, ax.use("rope", theta=10_000.0))


def llama_1b() -> Trainer.Config:
    """1.1B parameters, 16 layers, grouped-query attention: fits one large accelerator."""
    return llama(
        dim=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=8192,
        vocab_size=32_000,
        seq_len=2048,
        batch_size=256,
        peak=3e-4,
        steps=100_000,
    )


def llama2_7b() -> Trainer.Config:
    """Llama 2 7B with the hyper-parameters of the paper (section 2.2): 4M tokens a step, 2T tokens."""
    return llama(
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        hidden_dim=11_008,
        vocab_size=32_000,
        seq_len=4096,
        batch_size=1024,
        peak=3e-4,
        steps=500_000,
    )
