"""Feed-forward blocks."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from axcore.config import REQUIRED, at_least
from axcore.module import Layer, Rngs
from axcore.nn import activations  # noqa: F401 - names them
from axcore.nn.linear import Linear
from axcore.nn.matmul import rows


class FeedForward(Layer):
    """`down(activation(gate(x)) * up(x))`, SwiGLU by default (Shazeer 2020, arXiv 2002.05202, eq. 6).

    For remat policies the values `gate` and `up` are tagged.
    """

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        hidden_dim: int = REQUIRED
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
        gate: Linear.Config = Linear.Config()
        up: Linear.Config = Linear.Config()
        down: Linear.Config = Linear.Config()

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "input_dim", "hidden_dim")
        wide = {"input_dim": cfg.input_dim, "output_dim": cfg.hidden_dim, "axes": ("embed", "mlp")}
        self.gate = self.child("gate", cfg.gate, rngs, **wide)
        self.up = self.child("up", cfg.up, rngs, **wide)
        narrow = {"input_dim": cfg.hidden_dim, "output_dim": cfg.input_dim, "axes": ("mlp", "embed")}
        self.down = self.child("down", cfg.down, rngs, **narrow)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape."""
        flat = rows(x)
        gate, up = checkpoint_name(self.gate(flat), "gate"), checkpoint_name(self.up(flat), "up")
        return self.down(self.config.activation(gate) * up).reshape(x.shape)
