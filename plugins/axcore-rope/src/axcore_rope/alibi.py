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
        is_rounded: bool = False
        """Whether slopes, positions and their products are rounded to bfloat16 before `scale` applies (Falcon, in every
        dtype). Neighbouring keys of a long row then share a bias."""

    config: Config
    uses_dtypes = False

    def __call__(self, query: TokenInfo, key: TokenInfo) -> jax.Array:
        """float32 [batch or 1, head, query, key]. Distances are differences of positions.

        Raises:
            ConfigError: the positions have several coordinates.
        """
        if query.positions.ndim != 2:
            raise ax.ConfigError(
                f"{self.frame.path}: positions have {query.positions.shape[-1]} coordinates, but ALiBi requires one"
            )
        steep = jnp.asarray(slopes(self.config.num_heads), jnp.float32)[:, None]
        if self.config.is_rounded:
            of_query, of_key = (
                _rounded(_rounded(steep) * _rounded(each.positions[:, None].astype(jnp.float32)))
                for each in (query, key)
            )
            return self.config.scale * (of_key[:, :, None] - of_query[:, :, :, None])
        distance = jnp.abs(query.positions[:, :, None] - key.positions[:, None, :])
        return -self.config.scale * steep[:, :, None] * distance[:, None]


def _rounded(x: jax.Array) -> jax.Array:
    """x with the precision of bfloat16."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


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
