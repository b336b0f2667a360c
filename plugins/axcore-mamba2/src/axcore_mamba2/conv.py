"""A short causal convolution per channel."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import axcore as ax
from axcore.nn import FanIn, Initializer, TokenInfo, Windowed, Zeros


class CausalConv(Windowed):
    """`y_t = sum_k weight_k x_{t - width + 1 + k} + bias`, per channel and within a document.

    Positions before a document count as zeros. The sum is in float32.
    """

    class Config(Windowed.Config):
        shares_pages: ClassVar[bool] = False  # the states of `Mamba2` are not in pages
        input_dim: ax.PositiveInt = ax.REQUIRED
        width: ax.PositiveInt = ax.REQUIRED
        init: Initializer = FanIn(scale=1 / 3)
        """The variance of the published code, whose initial weights are uniform within +-1 / sqrt(width)."""
        use_bias: bool = True
        axes: tuple[str | None, str | None] | None = None
        """Logical axes of the weight, [width, input_dim]. None uses the parent's, or replicates."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        axes = cfg.axes or (None, None)
        self.weight = self.param("weight", (cfg.width, cfg.input_dim), cfg.init, rngs, axes=axes)
        self.bias = nnx.data(None)
        if cfg.use_bias:
            self.bias = self.param("bias", (cfg.input_dim,), Zeros(), rngs, axes=axes[1:])
        self.remember(cfg.width - 1, cfg.input_dim, axis=axes[1])

    def __call__(self, x: jax.Array, tokens: TokenInfo) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape, in the compute dtype."""
        inputs, y = self.lagged(x, tokens), jnp.zeros(x.shape, jnp.float32)
        for k, weight in enumerate(self.weight[...].astype(jnp.float32)):
            y += inputs[self.config.width - 1 - k] * weight
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)
        return y.astype(self.dtypes.compute)
