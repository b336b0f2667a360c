"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864, eq. 15 and 34)."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore_rope.scaling import Rates, Scaling, plain

Layout = Literal["half", "interleaved"]


class Rotary(ax.Layer):
    """Rotates pairs of features of queries and keys by an angle that grows with the position."""

    class Config(ax.Layer.Config):
        head_dim: ax.PositiveInt = ax.REQUIRED
        theta: ax.PositiveFloat = 10_000.0
        """Pair i rotates at the rate `theta ** (-2 i / rotary_dim)`."""
        layout: Layout = "half"
        """Which features form a pair: i and i + rotary_dim / 2, as in checkpoints of `transformers`, or 2 i and
        2 i + 1, as in the paper."""
        rotary_dim: ax.PositiveInt | None = None
        """Number of leading features that are rotated (GPT-NeoX, arXiv 2204.06745). None rotates all."""
        scaling: Scaling | None = None
        sections: tuple[ax.NonNegativeInt, ...] | None = None
        """For positions with several coordinates, the number of pairs that rotate by each coordinate (M-RoPE: Qwen2-VL,
        arXiv 2409.12191, section 2.1). They sum to rotary_dim / 2."""
        interleave_sections: bool = False
        """The coordinates alternate pair by pair until their sections are used up; the first coordinate gets the rest
        (Qwen3-VL, arXiv 2511.21631)."""

    config: Config
    uses_dtypes = False

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        del rngs  # no parameters
        rotary_dim = cfg.head_dim if cfg.rotary_dim is None else cfg.rotary_dim
        if cfg.head_dim % 2 and cfg.rotary_dim is None:
            raise ax.ConfigError(f"RoPE rotates pairs of features, so head_dim must be even, not {cfg.head_dim}")
        if rotary_dim % 2 or not 0 < rotary_dim <= cfg.head_dim:
            raise ax.ConfigError(
                f"rotary_dim must be even, positive and at most head_dim={cfg.head_dim}, not {cfg.rotary_dim}"
            )
        if cfg.sections is not None and (sum(cfg.sections) != rotary_dim // 2):
            raise ax.ConfigError(f"sections={cfg.sections} must sum to the {rotary_dim // 2} pairs that are rotated")
        if cfg.interleave_sections and cfg.sections is None:
            raise ax.ConfigError("interleave_sections=True requires sections")
        self.rotary_dim = rotary_dim
        if cfg.scaling is not None:
            _check_rates(cfg.scaling, cfg.theta, rotary_dim)
        self.coordinates = _coordinates(cfg.sections or (rotary_dim // 2,), cfg.interleave_sections)

    def __call__(
        self, q: jax.Array, k: jax.Array | None, query_positions: jax.Array, key_positions: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Rotates queries and keys.

        Args:
            q: [batch, seq, head, head_dim].
            k: [batch, kv_seq, kv_head, head_dim], or None if the attention does not compute keys.
            query_positions, key_positions: int [batch or 1, seq] and [batch or 1, kv_seq]. With `sections`, they may
                have a last dimension of coordinates. Without that dimension, all coordinates are equal, as for text.

        Returns:
            q and k in their shapes and dtypes. The rotation is computed in float32.
        """
        rates, factor = self._rates(query_positions, key_positions)
        turn = self._turn(query_positions, rates, factor)
        rotated = self._rotate(q, turn)
        if k is None:
            return rotated, None
        if key_positions is not query_positions:
            turn = self._turn(key_positions, rates, factor)
        return rotated, self._rotate(k, turn)

    def _rates(self, query_positions: jax.Array, key_positions: jax.Array) -> tuple[Rates, float]:
        """Radians per position, and the factor that multiplies rotated queries and keys.

        The rates are [rotary_dim / 2], or [batch or 1, 1, rotary_dim / 2] if they depend on the length.
        """
        theta, scaling = self.config.theta, self.config.scaling
        if scaling is None:
            return plain(theta, self.rotary_dim), 1.0
        if not scaling.by_length:
            return scaling.rates(theta, self.rotary_dim, None), scaling.attention_scaling
        largest = [jnp.max(each.reshape(len(each), -1), axis=1) for each in (query_positions, key_positions)]
        of_row = jax.vmap(lambda length: scaling.rates(theta, self.rotary_dim, length))
        return of_row(jnp.maximum(*largest) + 1)[:, None], scaling.attention_scaling

    def _turn(self, positions: jax.Array, rates: Rates, factor: float) -> tuple[jax.Array, jax.Array]:
        """cos and sin of the angles, float32 [batch or 1, seq, 1, rotary_dim / 2]."""
        places = positions[..., None] if positions.ndim == 2 else self._by_pair(positions)
        angles = places.astype(jnp.float32) * jnp.asarray(rates, jnp.float32)
        return jnp.cos(angles)[:, :, None] * factor, jnp.sin(angles)[:, :, None] * factor

    def _by_pair(self, positions: jax.Array) -> jax.Array:
        """[batch or 1, seq, coordinates] -> the coordinate that rotates each pair, [batch or 1, seq, pairs]."""
        sections, found = self.config.sections, positions.shape[-1]
        if sections is None or found != len(sections):
            raise ax.ConfigError(
                f"{self.frame.path}: positions have {found} coordinates. RoPE requires a section for each, but "
                f"sections={sections}"
            )
        return positions[..., np.array(self.coordinates)]

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


def _coordinates(sections: tuple[int, ...], interleave: bool) -> tuple[int, ...]:
    """The index of the coordinate that rotates each pair."""
    if not interleave:
        return tuple(coordinate for coordinate, count in enumerate(sections) for _ in range(count))
    many = len(sections)
    turns = ((pair % many, pair // many) for pair in range(sum(sections)))
    found = tuple(coordinate if turn < sections[coordinate] else 0 for coordinate, turn in turns)
    if tuple(found.count(coordinate) for coordinate in range(many)) != sections:
        raise ax.ConfigError(
            f"sections={sections} cannot alternate: each section except the first gets at most one of {many} pairs"
        )
    return found


def _check_rates(scaling: Scaling, theta: float, rotary_dim: int) -> None:
    """Computes the rates once while the layer is built, so that errors have the config path."""

    def rates(length: jax.Array) -> jax.Array:
        return jnp.asarray(scaling.rates(theta, rotary_dim, length if scaling.by_length else None))

    found = jax.eval_shape(rates, jax.ShapeDtypeStruct((), jnp.int32)).shape
    if found != (rotary_dim // 2,):
        raise ax.ConfigError(
            f"scaling={scaling!r} gives rates of shape {found}, but {rotary_dim} rotated features require "
            f"({rotary_dim // 2},)"
        )
