"""Attention with linear biases."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import BaseAttention, TokenInfo
from axcore.plugin.slots import put


class Alibi(ax.Layer):
    """Lowers the logit of a key in proportion to its distance, at a slope of its own for each head (Press et al. 2021,
    arXiv 2108.12409, section 3). It fills attention's `bias` slot."""

    class Config(ax.Layer.Config):
        num_heads: int = ax.REQUIRED

    config: Config

    def __call__(self, query: TokenInfo, key: TokenInfo) -> jax.Array:
        """float32 [batch or 1, head, query, key]. Distances are of positions.

        Raises:
            ConfigError: positions of several coordinates.
        """
        if query.positions.ndim != 2:
            raise ax.ConfigError(
                f"{self.frame.path}: positions have {query.positions.shape[-1]} coordinates, and ALiBi knows one"
            )
        distance = jnp.abs(query.positions[:, :, None] - key.positions[:, None, :])
        return -jnp.asarray(slopes(self.config.num_heads), jnp.float32)[:, None, None] * distance[:, None]


def slopes(num_heads: int) -> list[float]:
    """`2 ** (-8 (i + 1) / n)` for a power of two; else those of the power below, then every second of the one
    above (as in the paper's code)."""
    power = 2 ** math.floor(math.log2(num_heads))
    below = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    above = [2 ** (-8 * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return below + above[: num_heads - power]


def use_alibi(cfg: ax.Config, where: ax.Where = BaseAttention) -> ax.Config:
    """Puts linear biases into the bias slot of every selected attention.

    Args:
        where: which attentions.
    """
    return ax.select(cfg, where).map(lambda _, attention: put(attention, "bias", Alibi.Config()))
