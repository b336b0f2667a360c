"""INT4 weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from axcore_int8.straight_through import StraightThrough

LOWEST, HIGHEST = -8, 7
RATIOS = tuple(0.5 + 0.025 * step for step in range(27))
"""Ratios of the scales that the search compares to the scale without clipping, up to 1.15: a larger scale can be better
for all values but the largest."""


class Int4(StraightThrough):
    """Float products with weights of 4 bits, and one scale for each group of `group_size` consecutive inputs.

    The value of largest magnitude in a group becomes -8, so the scale has its opposite sign and all 16 codes are used.
    Activations stay floats. In training, the float weight is rounded in each call.

    For inference, the weight is stored as `codes`, uint8 [in / 2, out] with the code of an even input in the low and of
    the next input in the high bits, each plus 8, and `scales`, bfloat16 [in / group_size, out]. Sizes are rounded up;
    the last group may be smaller.
    """

    class Config(StraightThrough.Config):
        group_size: Literal[32, 64, 128] = 32
        """Number of inputs that share a scale. A weight takes 4 + 16 / group_size bits per element."""
        clipping: Literal["mse"] | None = "mse"
        """Chooses the scale of each group among 27 by the smallest sum of squared errors, at 27 times the cost of
        rounding; None: the scale that clips no value of largest magnitude."""

    config: Config

    def encode(self, weight: Float[Array, "*shape"]) -> dict[str, jax.Array]:
        x, axis = weight.astype(jnp.float32), self.config.input_axis
        in_groups = self._in_groups(x)
        highest, lowest = (each(in_groups, axis, keepdims=True) for each in (jnp.max, jnp.min))
        unclipped = jnp.where(highest > -lowest, highest, lowest) / LOWEST
        scales = _stored(unclipped) if self.config.clipping is None else _searched(in_groups, unclipped, axis)
        codes = _codes(in_groups, scales) - LOWEST
        codes = jax.lax.slice_in_dim(codes.reshape(self._padded(x.shape)), 0, x.shape[axis], axis=axis)
        return {"codes": _packed(codes.astype(jnp.uint8), axis), "scales": scales.squeeze(axis).astype(jnp.bfloat16)}

    def decode(self, stored: Mapping[str, jax.Array]) -> Float[Array, "*shape"]:
        axis = self.config.input_axis
        codes = _unpacked(stored["codes"], axis, self.config.shape[axis]).astype(jnp.float32) + LOWEST
        in_groups = self._in_groups(codes) * jnp.expand_dims(stored["scales"].astype(jnp.float32), axis)
        whole = in_groups.reshape(self._padded(codes.shape))
        return jax.lax.slice_in_dim(whole, 0, codes.shape[axis], axis=axis)

    def _padded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with the input axis rounded up to whole groups."""
        axis, size = self.config.input_axis % len(shape), self.config.group_size
        return (*shape[:axis], -(-shape[axis] // size) * size, *shape[axis + 1 :])

    def _in_groups(self, x: Float[Array, "*shape"]) -> Float[Array, "*grouped"]:
        """Splits the input axis into groups, [..., group, group_size, ...], padded with zeros."""
        axis, padded = self.config.input_axis % x.ndim, self._padded(x.shape)
        x = jnp.pad(x, [(0, new - old) for new, old in zip(padded, x.shape, strict=True)])
        return x.reshape(*padded[:axis], -1, self.config.group_size, *padded[axis + 1 :])


def _stored(scales: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The scales as bfloat16 holds them, and 1 instead of 0."""
    scales = scales.astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.where(scales == 0, 1.0, scales)


def _codes(x: Float[Array, "*grouped"], scales: Float[Array, "*scales"]) -> Float[Array, "*grouped"]:
    return jnp.clip(jnp.round(x / scales), LOWEST, HIGHEST)


def _searched(x: jax.Array, unclipped: jax.Array, axis: int) -> jax.Array:
    """The scales with the smallest sum of squared errors."""

    def compare(best: tuple[jax.Array, jax.Array], ratio: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        scales = _stored(ratio * unclipped)
        error = jnp.square(_codes(x, scales) * scales - x).sum(axis, keepdims=True)
        better = error < best[1]
        return (jnp.where(better, scales, best[0]), jnp.where(better, error, best[1])), None

    start = _stored(unclipped), jnp.full(unclipped.shape, jnp.inf)
    return jax.lax.scan(compare, start, jnp.asarray(RATIOS))[0][0]


def _packed(codes: Int[Array, "*shape"], axis: int) -> UInt8[Array, "*packed"]:
    """Two codes from 0 to 15 in each byte, along the axis."""
    axis %= codes.ndim
    odd = [(0, codes.shape[axis] % 2 if each == axis else 0) for each in range(codes.ndim)]
    codes = jnp.pad(codes, odd)
    low, high = (jax.lax.slice_in_dim(codes, start, None, 2, axis) for start in (0, 1))
    return low | high << 4


def _unpacked(packed: UInt8[Array, "*packed"], axis: int, size: int) -> Int[Array, "*shape"]:
    axis %= packed.ndim
    pairs = jnp.stack([packed & 15, packed >> 4], axis + 1)
    shape = (*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])
    return jax.lax.slice_in_dim(pairs.reshape(shape), 0, size, axis=axis)
