"""The normalization at the end of Mamba-2."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import Initializer, Ones


class GatedRMSNorm(ax.Layer):
    """`rms_norm(x * silu(gate)) * scale`, in float32, with a separate rms for each of `num_groups` groups of features.

    Source: Dao and Gu 2024, arXiv 2405.21060, section 7.1. The groups match those that share B and C, so that tensor
    parallelism can split between groups (section 8.1).
    """

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        num_groups: ax.PositiveInt = ax.REQUIRED
        eps: ax.PositiveFloat = 1e-5
        init: Initializer = Ones()

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        if cfg.input_dim % cfg.num_groups:
            raise ax.ConfigError(f"input_dim={cfg.input_dim} is not a multiple of num_groups={cfg.num_groups}")
        self.scale = self.param("scale", (cfg.input_dim,), cfg.init, rngs, axes=("head",))

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Both [..., input_dim] -> the same shape, in the compute dtype."""
        y = x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        groups = y.reshape(*y.shape[:-1], self.config.num_groups, -1)
        variance = jnp.mean(jnp.square(groups), axis=-1, keepdims=True)
        y = (groups * jax.lax.rsqrt(variance + self.config.eps)).reshape(y.shape)
        return (y * self.scale[...].astype(jnp.float32)).astype(self.dtypes.compute)
