"""Computes in bfloat16 with float32 sums, only in the decoder."""

import jax.numpy as jnp

import axcore as ax
from axcore.nn import BaseAttention, CausalLM, FeedForward, Repeat, TransformerLayer
from axcore.train import Trainer

from ..training import pretraining


def recipe(attention: BaseAttention.Config) -> Trainer.Config:
    layer = TransformerLayer.Config(attention=attention, ffn=FeedForward.Config(hidden_dim=24))
    decoder = Repeat.Config(
        num_layers=2,
        layers=layer,
        dtypes=ax.DTypes(compute=jnp.bfloat16, accumulate=jnp.float32),
    )
    return pretraining(CausalLM.Config(vocab_size=32, dim=32, decoder=decoder))
