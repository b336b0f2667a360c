"""Conversion of float arrays to FP8 codes with scales."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

E4M3 = jnp.float8_e4m3fn
"""4 bits of exponent and 3 of mantissa, up to 448: activations and weights (Micikevicius et al. 2022, arXiv
2209.05433)."""
E5M2 = jnp.float8_e5m2
"""5 bits of exponent and 2 of mantissa, up to 57344: gradients."""

BLOCK = 128
"""Number of elements that share a scale along a dimension, with block scaling."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array `codes * scale`.

    Attributes:
        codes: E4M3 or E5M2.
        scale: float32, powers of two: a scalar, or one per block. In the second case, each dimension has the size of
            the codes, or one element per `BLOCK` elements of the codes.
    """

    codes: Array
    scale: Float[Array, "*blocks"]

    def dequantized(self, dtype: DTypeLike) -> Float[Array, ...]:
        """The array in this dtype. The values are exact in bfloat16, because scales are powers of two."""
        scale = self.scale
        for axis, (size, blocks) in enumerate(zip(self.codes.shape, scale.shape, strict=False)):
            if blocks != size:
                scale = jax.lax.slice_in_dim(jnp.repeat(scale, BLOCK, axis), 0, size, axis=axis)
        return (self.codes.astype(jnp.float32) * scale).astype(dtype)


def scale_of(amax: Float[Array, "*shape"], dtype: DTypeLike) -> Float[Array, "*shape"]:
    """`amax / finfo(dtype).max`, rounded up to a power of two.

    A power of two makes `x / scale` exact, and so is the product of two scales in bfloat16.

    Args:
        amax: float32, the largest absolute values.

    Returns:
        float32, at least the smallest normal number; 1 where amax is 0, and NaN where it is not finite, so that the
        product is NaN as well.
    """
    ratio = amax.astype(jnp.float32) / float(jnp.finfo(dtype).max)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32) + jnp.uint32(0x007FFFFF)
    scale = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFF800000), jnp.float32)
    scale = jnp.maximum(scale, float(jnp.finfo(jnp.float32).tiny))  # devices flush a subnormal ratio to 0
    return jnp.where(jnp.isfinite(amax), jnp.where(amax == 0, 1.0, scale), jnp.nan)


def amax_of(x: Float[Array, ...]) -> Float[Array, ""]:
    """The largest absolute value, in float32. It is not finite if any element is not."""
    return jnp.abs(x).max(initial=0.0).astype(jnp.float32)


def quantize(x: Float[Array, "*shape"], dtype: DTypeLike, scale: Float[Array, ""]) -> Quantized:
    """Rounds `x / scale` to the dtype. Numbers out of range saturate, infinities too, and NaN remains.

    The computation is in float32: in bfloat16, XLA for GPUs would fuse it into an FP8 product that depends on its own
    scale, and fail to compile.

    Args:
        scale: a power of two, so that multiplication by its inverse is exact.
    """
    return Quantized(_rounded(x.astype(jnp.float32) * (1 / scale), dtype), scale)


def quantize_blocks(x: Float[Array, "*shape"], dtype: DTypeLike, dims: int) -> Quantized:
    """Rounds with one scale per 128 elements of the last dimension, or per 128 x 128 elements of the last two.

    Args:
        dims: 1 or 2, the number of dimensions of a block.
    """
    first = x.ndim - dims
    wide = x.astype(jnp.float32)
    padded = jnp.pad(wide, [(0, 0 if axis < first else -size % BLOCK) for axis, size in enumerate(x.shape)])
    split = [size for axis, size in enumerate(padded.shape) for size in _split(size, axis >= first)]
    axes = tuple(first + 2 * dim + 1 for dim in range(dims))
    scale = scale_of(jnp.abs(padded.reshape(split)).max(axes), dtype)
    ones = Quantized(jnp.ones(x.shape, dtype), scale).dequantized(jnp.float32)
    return Quantized(_rounded(wide / ones, dtype), scale)


def overflows(amax: Float[Array, ""], scale: Float[Array, ""], dtype: DTypeLike) -> Bool[Array, ""]:
    """Whether an array with this largest value has numbers that are out of range, or not finite."""
    return ~(amax <= scale * float(jnp.finfo(dtype).max))


def _rounded(x: Float[Array, "*shape"], dtype: DTypeLike) -> Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)  # the conversion does not saturate


def _split(size: int, blocked: bool) -> tuple[int, ...]:
    return (size // BLOCK, BLOCK) if blocked else (size,)
