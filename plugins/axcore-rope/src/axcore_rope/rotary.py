"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864, eq. 15 and 34)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.nn import Attention
from axcore.plugin.slots import put


class Rotary(ax.Layer):
    """Rotates pairs of features of queries and keys by an angle that grows with the position.

    Feature `i` pairs with feature `i + head_dim / 2` and turns at the rate `theta ** (-2 i / head_dim)`: the layout of
    published Llama checkpoints in `transformers`.
    """

    class Config(ax.Layer.Config):
        head_dim: int = ax.REQUIRED
        theta: float = 10_000.0

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        del rngs  # no parameters
        if cfg.head_dim % 2:
            raise ax.ConfigError(f"RoPE rotates pairs of features, so head_dim must be even, not {cfg.head_dim}")
        if cfg.theta <= 0:
            raise ax.ConfigError(f"theta must be positive, not {cfg.theta}")

    def __call__(
        self, q: jax.Array, k: jax.Array | None, query_positions: jax.Array, key_positions: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Rotates both.

        Args:
            q: [batch, seq, head, head_dim].
            k: [batch, kv_seq, kv_head, head_dim]; None where attention has no keys of its own.
            query_positions, key_positions: int [batch or 1, seq] and [batch or 1, kv_seq].

        Returns:
            q and k in their shapes and dtypes; the rotation is in float32.
        """
        return self._rotate(q, query_positions), None if k is None else self._rotate(k, key_positions)

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        half = self.config.head_dim // 2
        rates = self.config.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angles = positions[:, :, None, None].astype(jnp.float32) * rates
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def use_rope(cfg: ax.Config, theta: float = 10_000.0, where: ax.Where = Attention) -> ax.Config:
    """Puts RoPE into the position slot of every selected attention; where a layer with such a slot stands, into that.

    Args:
        theta: the base of the rates; larger turns slower and reaches further.
        where: which attentions.
    """
    return ax.select(cfg, where).map(lambda _, attention: put(attention, "position", Rotary.Config(theta=theta)))
