"""A gate on the output of each attention head (Qiu et al. 2025, arXiv 2505.06708, the head-wise variant)."""

from __future__ import annotations

import jax

import axcore as ax
from axcore.nn import Attention, Linear


class HeadGate(ax.Layer):
    """`heads * sigmoid(gate(x))`, with one gate per token and head."""

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        num_heads: ax.PositiveInt = ax.REQUIRED
        gate: Linear.Config = Linear.Config(use_bias=True)

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        wide = {"input_dim": cfg.input_dim, "output_dim": cfg.num_heads, "axes": ("embed", "head")}
        self.gate = self.child("gate", cfg.gate, rngs, **wide)

    def __call__(self, x: jax.Array, heads: jax.Array) -> jax.Array:
        """Scales the heads.

        Args:
            x: [batch, seq, input_dim], the input of attention.
            heads: [batch, seq, head, head_dim], the output of its kernel.

        Returns:
            [batch, seq, head, head_dim] in the dtype of heads.
        """
        gate = jax.nn.sigmoid(self.gate(x)).astype(heads.dtype)
        self.add_summary("mean_gate", gate.mean())
        return heads * gate[..., None]


def use_gate(cfg: ax.Config, where: ax.Where = Attention, use_bias: bool = True) -> ax.Config:
    """Fills the `output` slot of every selected attention layer with the gate.

    Args:
        where: selects attention layers.
        use_bias: whether the gates have biases.
    """
    return ax.select(cfg, where).put(output=HeadGate.Config(gate=Linear.Config(use_bias=use_bias)))
