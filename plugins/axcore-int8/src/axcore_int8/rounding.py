"""Rounding to integers from -127 to 127, to the nearest one or stochastically."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, PRNGKeyArray

LARGEST = 127
MAX_TERMS = (2**31 - 1) // LARGEST**2
"""The largest number of products of two codes whose sum cannot overflow int32."""


def scale_of(largest: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The float32 scale that maps `largest`, a maximum of absolute values, to 127; 1 where there are only zeros."""
    scale = largest.astype(jnp.float32) / LARGEST
    # A NaN stays, so that it reaches the result.
    return jnp.where((scale == 0) | (scale == -jnp.inf), 1.0, scale)


def rounded(x: Float[Array, "*shape"], key: PRNGKeyArray | None = None) -> Int8[Array, "*shape"]:
    """Rounds float32 numbers to the nearest integers, and clips to -127 and 127.

    Args:
        key: rounds stochastically: up with a probability equal to the fraction, so that the mean of the result is x
            (Gupta et al. 2015, arXiv 1502.02551, section 3). Uses 16 random bits per element.
    """
    if key is None:
        whole = jnp.round(x)
    else:
        bits = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.float32)
        whole = jnp.floor(x + (bits + 0.5) / 2**16)
    return jnp.clip(whole, -LARGEST, LARGEST).astype(jnp.int8)


def quantized(
    x: Float[Array, "*shape"], axis: int, key: PRNGKeyArray | None = None
) -> tuple[Int8[Array, "*shape"], Float[Array, "*scales"]]:
    """Codes in the shape of x, and a float32 scale for each vector along the axis, with `x ~ codes * scale`."""
    x = x.astype(jnp.float32)
    scale = scale_of(jnp.abs(x).max(axis, keepdims=True))
    return rounded(x / scale, key), scale
