"""Building blocks for recipes of published models: initialization and pre-training settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

import axcore as ax
from axcore.nn import CausalLM, Linear, Normal, RMSNorm, stacked
from axcore.parallel import ByTag
from axcore.train import AdamW, CrossEntropy, Learner, Trainer, WarmupCosine
from axcore.train.data import TextFiles, TextInput


def causal_lm(
    layers: Sequence[ax.Layer.Config],
    *,
    dim: int,
    vocab_size: int,
    eps: float = 1e-5,
    tied: bool = False,
    **fields: Any,
) -> CausalLM.Config:
    """A bfloat16 model of these layers, initialized with standard deviation 0.02.

    Args:
        eps: epsilon of every RMSNorm.
        tied: whether the embedding is also the head.
        fields: fields of `CausalLM.Config`.
    """
    decoder = stacked(layers, remat=ByTag(save=("query", "key", "value", "heads", "gate", "up")))
    head = None if tied else Linear.Config()
    cfg = CausalLM.Config(
        vocab_size=vocab_size,
        dim=dim,
        dtypes=ax.DTypes(compute=jnp.bfloat16),
        decoder=decoder,
        head=head,
        **fields,
    )
    cfg = ax.select(cfg, Linear).set(init=Normal(stddev=0.02))
    return ax.select(cfg, RMSNorm).set(eps=eps)


def pretraining(
    model: CausalLM.Config,
    *,
    seq_len: int,
    batch_size: int,
    steps: int,
    peak: float = 3e-4,
    warmup_steps: int = 2000,
    loss_chunk: int | None = None,
) -> Trainer.Config:
    """Pre-training with AdamW, a cosine schedule and FSDP.

    The text and its tokenizer are REQUIRED: set `input.source.folder` and `input.tokenizer`.

    Args:
        loss_chunk: `chunk` of the cross-entropy, which saves memory with large vocabularies.
    """
    return Trainer.Config(
        model=model,
        objective=CrossEntropy.Config(chunk=loss_chunk),
        input=TextInput.Config(
            source=TextFiles.Config(), tokenizer=ax.REQUIRED, seq_len=seq_len, batch_size=batch_size
        ),
        learner=Learner.Config(
            optimizer=AdamW.Config(b1=0.9, b2=0.95, weight_decay=0.1),
            schedule=WarmupCosine(peak=peak, warmup_steps=warmup_steps, final=0.1),
        ),
        mesh=ax.Mesh(shape={"data": 1, "fsdp": -1}),
        steps=steps,
    )
