"""Learned positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import CausalLM, Initializer, Normal

INIT: Initializer = Normal()


class LearnedPositions(ax.Layer):
    """Adds a vector for each position to the embeddings (Gehring et al. 2017, arXiv 1705.03122; GPT-2)."""

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        max_len: ax.PositiveInt = ax.REQUIRED
        """Number of learned positions. Tokens at later positions become NaN, since nothing was learned for them."""
        init: Initializer = INIT

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        shape = (cfg.max_len, cfg.input_dim)
        self.weight = self.param("weight", shape, cfg.init, rngs, axes=(None, "embed"))

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """[batch, seq, input_dim], int [batch or 1, seq] -> [batch, seq, input_dim].

        Raises:
            ConfigError: a row is longer than `max_len`, or the positions have several coordinates.
        """
        max_len = self.config.max_len
        if positions.ndim != 2:
            raise ax.ConfigError(
                f"{self.frame.path}: positions have {positions.shape[-1]} coordinates, but learned positions require "
                f"one"
            )
        if x.shape[1] > max_len:
            raise ax.ConfigError(f"{self.frame.path}: the row has {x.shape[1]} tokens, but max_len={max_len}")
        known = (positions >= 0) & (positions < max_len)
        vectors = self.weight[...].astype(x.dtype)[jnp.where(known, positions, 0)]
        return x + jnp.where(known[..., None], vectors, jnp.nan)


def use_learned_positions(
    cfg: ax.Config, max_len: int, init: Initializer = INIT, where: ax.Where = CausalLM
) -> ax.Config:
    """Adds learned positions to the embeddings of every selected model. Does not remove RoPE.

    Args:
        max_len: number of learned positions.
        init: initializer of the vectors.
        where: which models.
    """
    learned = LearnedPositions.Config(max_len=max_len, init=init)
    return ax.select(cfg, where).put(position=learned)
