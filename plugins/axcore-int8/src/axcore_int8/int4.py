"""INT4 weights, with a scale and an offset for each group of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from axcore_int8.straight_through import StraightThrough

LARGEST = 15


class Int4(StraightThrough):
    """Float products with weights of 4 bits. Each group of `group_size` consecutive inputs has a scale and an offset.

    A weight is `code * scale + offset`, with codes from 0 to 15 for the smallest to the largest value of a group.
    Activations stay floats. In training, the float weight is rounded in each call.

    For inference, the weight is stored as `codes`, uint8 [in / 2, out] with the code of an even input in the low and of
    the next input in the high bits, and as `scales` and `offsets`, bfloat16 [in / group_size, out]. Sizes are rounded
    up; the last group may be smaller.
    """

    class Config(StraightThrough.Config):
        group_size: Literal[32, 64, 128] = 32
        """Number of inputs that share a scale and an offset. A weight takes 4 + 32 / group_size bits per element."""

    config: Config

    def encode(self, weight: Float[Array, "*shape"]) -> dict[str, jax.Array]:
        x, axis = weight.astype(jnp.float32), self.config.input_axis
        in_groups = self._in_groups(x)
        scales, offsets = _grid(in_groups, axis)
        codes = jnp.clip(jnp.round((in_groups - offsets) / scales), 0, LARGEST).reshape(self._padded(x.shape))
        codes = jax.lax.slice_in_dim(codes, 0, x.shape[axis], axis=axis)
        of_group = {"offsets": offsets, "scales": scales}
        kept = {name: each.squeeze(axis).astype(jnp.bfloat16) for name, each in of_group.items()}
        return {"codes": _packed(codes.astype(jnp.uint8), axis), **kept}

    def decode(self, stored: Mapping[str, jax.Array]) -> Float[Array, "*shape"]:
        axis = self.config.input_axis
        codes = _unpacked(stored["codes"], axis, self.config.shape[axis]).astype(jnp.float32)
        scales, offsets = (jnp.expand_dims(stored[name].astype(jnp.float32), axis) for name in ("scales", "offsets"))
        whole = (self._in_groups(codes) * scales + offsets).reshape(self._padded(codes.shape))
        return jax.lax.slice_in_dim(whole, 0, codes.shape[axis], axis=axis)

    def _padded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with the input axis rounded up to whole groups."""
        axis, size = self.config.input_axis % len(shape), self.config.group_size
        return (*shape[:axis], -(-shape[axis] // size) * size, *shape[axis + 1 :])

    def _in_groups(self, x: Float[Array, "*shape"]) -> Float[Array, "*grouped"]:
        """Splits the input axis into groups, [..., group, group_size, ...], padded with its last value."""
        axis, padded = self.config.input_axis % x.ndim, self._padded(x.shape)
        x = jnp.pad(x, [(0, new - old) for new, old in zip(padded, x.shape, strict=True)], mode="edge")
        return x.reshape(*padded[:axis], -1, self.config.group_size, *padded[axis + 1 :])


def _grid(x: Float[Array, "*grouped"], axis: int) -> tuple[Float[Array, "*grid"], Float[Array, "*grid"]]:
    """(scale, offset) of each group, with the input axis of size 1, in values of bfloat16. The scale of a constant is
    1."""
    highest, lowest = x.max(axis, keepdims=True), x.min(axis, keepdims=True)
    scales = (highest - lowest) / LARGEST
    scales, offsets = (
        each.astype(jnp.bfloat16).astype(jnp.float32) for each in (jnp.where(scales == 0, 1.0, scales), lowest)
    )
    return scales, offsets


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
