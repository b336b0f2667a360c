"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864, eq. 15 and 34)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore_rope.scaling import Scaling, plain


class Rotary(ax.Layer):
    """Rotates pairs of features of queries and keys by an angle that grows with the position."""

    class Config(ax.Layer.Config):
        head_dim: int = ax.REQUIRED
        theta: float = 10_000.0
        """Pair i turns at the rate `theta ** (-2 i / rotary_dim)`."""
        layout: Literal["half", "interleaved"] = "half"
        """Which features are a pair: i and i + rotary_dim / 2, as in checkpoints of `transformers`, or 2 i and 2 i + 1,
        as in the paper."""
        rotary_dim: int | None = None
        """The first so many features are rotated, the others stay (GPT-NeoX, arXiv 2204.06745); None: all."""
        scaling: Scaling | None = None
        sections: tuple[int, ...] | None = None
        """Positions have several coordinates: so many pairs turn by the first, so many by the second, and so on
        (M-RoPE: Qwen2-VL, arXiv 2409.12191, section 2.1). They add up to rotary_dim / 2."""
        interleave_sections: bool = False
        """The coordinates take turns, pair by pair, as far as their sections reach (Qwen3-VL)."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        del rngs  # no parameters
        rotary_dim = cfg.head_dim if cfg.rotary_dim is None else cfg.rotary_dim
        if cfg.head_dim % 2 and cfg.rotary_dim is None:
            raise ax.ConfigError(f"RoPE rotates pairs of features, so head_dim must be even, not {cfg.head_dim}")
        if rotary_dim % 2 or not 0 < rotary_dim <= cfg.head_dim:
            raise ax.ConfigError(
                f"rotary_dim must be even, positive and at most head_dim={cfg.head_dim}, not {cfg.rotary_dim}"
            )
        if not cfg.theta > 0:
            raise ax.ConfigError(f"theta must be positive, not {cfg.theta}")
        if cfg.sections is not None and (sum(cfg.sections) != rotary_dim // 2 or min(cfg.sections) < 0):
            raise ax.ConfigError(f"sections={cfg.sections} must add up to the {rotary_dim // 2} pairs that are rotated")
        self.rotary_dim = rotary_dim

    def __call__(
        self, q: jax.Array, k: jax.Array | None, query_positions: jax.Array, key_positions: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Rotates both.

        Args:
            q: [batch, seq, head, head_dim].
            k: [batch, kv_seq, kv_head, head_dim]; None where attention has no keys of its own.
            query_positions, key_positions: int [batch or 1, seq] and [batch or 1, kv_seq]; with a last dimension of
                coordinates where there are `sections`. Without it all coordinates are the same, as those of text.

        Returns:
            q and k in their shapes and dtypes; the rotation is in float32.
        """
        turn = self._turn(query_positions)
        rotated = self._rotate(q, turn)
        if k is None:
            return rotated, None
        return rotated, self._rotate(k, turn if key_positions is query_positions else self._turn(key_positions))

    def _turn(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos and sin of the angles, float32 [batch or 1, seq, 1, rotary_dim / 2]."""
        cfg = self.config
        if positions.ndim == 3 and cfg.sections is None:
            raise ax.ConfigError(
                f"positions have {positions.shape[-1]} coordinates; RoPE needs sections to tell which are whose"
            )
        factor = 1.0
        if cfg.scaling is None:
            rates = plain(cfg.theta, self.rotary_dim)
        else:
            length = jnp.max(positions) + 1 if cfg.scaling.by_length else None
            rates, factor = cfg.scaling.rates(cfg.theta, self.rotary_dim, length), cfg.scaling.attention_factor
        places = positions[..., None] if positions.ndim == 2 else self._by_pair(positions)
        angles = places.astype(jnp.float32) * jnp.asarray(rates, jnp.float32)
        return jnp.cos(angles)[:, :, None] * factor, jnp.sin(angles)[:, :, None] * factor

    def _by_pair(self, positions: jax.Array) -> jax.Array:
        """[batch or 1, seq, coordinates] -> the coordinate that each pair turns by, [batch or 1, seq, pairs]."""
        sections = self.config.sections
        assert sections is not None
        if positions.shape[-1] != len(sections):
            raise ax.ConfigError(f"positions have {positions.shape[-1]} coordinates, and sections={sections}")
        if not self.config.interleave_sections:
            return positions[..., np.repeat(np.arange(len(sections)), sections)]
        of_pair = np.arange(self.rotary_dim // 2) % len(sections)
        for coordinate, count in enumerate(sections):
            of_pair[(of_pair == coordinate) & (np.arange(of_pair.size) >= count * len(sections))] = 0
        return positions[..., of_pair]

    def _rotate(self, x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
        cos, sin = turn
        x32, rest = x[..., : self.rotary_dim].astype(jnp.float32), x[..., self.rotary_dim :]
        if self.config.layout == "half":
            first, second = jnp.split(x32, 2, axis=-1)
            out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        else:
            first, second = x32[..., ::2], x32[..., 1::2]
            out = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x32.shape)
        out = out.astype(x.dtype)
        return out if rest.shape[-1] == 0 else jnp.concatenate([out, rest], axis=-1)
