"""The normalization at the end of Mamba-2."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import RMSNorm


class GatedRMSNorm(RMSNorm):
    """`rms_norm(x * silu(gate)) * scale`, in float32, with a separate rms for each of `groups` groups of features.

    Source: Dao and Gu 2024, arXiv 2405.21060, section 7.1. The groups match those that share B and C, so that tensor
    parallelism can split between groups (section 8.1).
    """

    class Config(RMSNorm.Config):
        groups: ax.PositiveInt = ax.REQUIRED
        axes: tuple[str | None] | None = ("head",)

    config: Config

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:  # type: ignore[override]  # a norm of two arrays
        """Both [..., input_dim] -> the same shape, in the compute dtype."""
        return super().__call__(x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32)))
