"""Attention with linear biases."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import BaseAttention, TokenInfo


class Alibi(ax.Layer):
    """Lowers the logit of a key in proportion to its distance, with a fixed slope per head (Press et al. 2021, arXiv
    2108.12409, section 3). It fills attention's `bias` slot."""

    class Config(ax.Layer.Config):
        num_heads: ax.PositiveInt = ax.REQUIRED
        scale: ax.PositiveFloat = 1.0
        """Factor of the slopes (Falcon: `head_dim ** -0.5`)."""

    config: Config

    def __call__(self, query: TokenInfo, key: TokenInfo) -> jax.Array:
        """float32 [batch or 1, head, query, key]. Distances are differences of positions.

        Raises:
            ConfigError: the positions have several coordinates.
        """
        if query.positions.ndim != 2:
            raise ax.ConfigError(
                f"{self.frame.path}: positions have {query.positions.shape[-1]} coordinates, but ALiBi requires one"
            )
        distance = jnp.abs(query.positions[:, :, None] - key.positions[:, None, :])
        steep = self.config.scale * jnp.asarray(slopes(self.config.num_heads), jnp.float32)
        return -steep[:, None, None] * distance[:, None]


def slopes(num_heads: int) -> list[float]:
    """`2 ** (-8 (i + 1) / n)` if n is a power of two. Otherwise the slopes for the next lower power of two, followed by
    every second slope for the next higher one, as in the paper's code."""
    power = 2 ** math.floor(math.log2(num_heads))
    below = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    above = [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return below + above[: num_heads - power]


def use_alibi(cfg: ax.Config, scale: float = 1.0, where: ax.Where = BaseAttention) -> ax.Config:
    """Fills the bias slot of every selected attention with linear biases.

    Args:
        scale: factor of the slopes.
        where: which attentions.
    """
    return ax.select(cfg, where).put(bias=Alibi.Config(scale=scale))
