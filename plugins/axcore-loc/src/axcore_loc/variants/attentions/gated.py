"""A gate on each head's output, as a custom layer."""

import jax

import axcore as ax
from axcore.nn import Attention, Linear


class Gate(ax.Layer):
    """`heads * sigmoid(gate(x))`, one number for each feature of each head (Qiu et al. 2025, arXiv 2505.06708)."""

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        num_heads: ax.PositiveInt = ax.REQUIRED
        head_dim: ax.PositiveInt = ax.REQUIRED
        gate: Linear.Config = Linear.Config(use_bias=True)

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        wide = {"input_dim": cfg.input_dim, "output_dim": cfg.num_heads * cfg.head_dim}
        self.gate = self.child("gate", cfg.gate, rngs, **wide)

    def __call__(self, x: jax.Array, heads: jax.Array) -> jax.Array:
        return heads * jax.nn.sigmoid(self.gate(x)).reshape(heads.shape)


def attention() -> Attention.Config:
    return Attention.Config(num_heads=4, output=Gate.Config())
