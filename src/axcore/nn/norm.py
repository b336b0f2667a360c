"""Normalization."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, at_least
from axcore.module import Layer, Rngs
from axcore.nn.initializers import Initializer, Ones


class RMSNorm(Layer):
    """`x / rms(x) * scale` over the last dimension, in float32 (Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4)."""

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        eps: float = 1e-5
        init: Initializer = Ones()
        axes: tuple[str | None] | None = None
        """Logical axis of the scale; None: the parent's, or `embed`."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "input_dim")
        self.scale = self.param("scale", (cfg.input_dim,), cfg.init, rngs, axes=cfg.axes or ("embed",))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., input_dim] -> the same shape, in the compute dtype."""
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        y = x32 * jax.lax.rsqrt(variance + self.config.eps) * self.scale[...].astype(jnp.float32)
        return y.astype(self.dtypes.compute)
