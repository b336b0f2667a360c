"""Dropout (Srivastava et al. 2014, JMLR 15, section 10)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from axcore.module import Layer


def dropout(layer: Layer, x: Float[Array, "*shape"], rate: float) -> Float[Array, "*shape"]:
    """While training, zeroes each element with probability `rate` and scales the others up; otherwise returns `x`.

    Args:
        layer: the layer that calls this function. The random bits come from its PRNG stream `dropout`.
    """
    return dropped(x, rate, layer.rng("dropout")) if rate and layer.training else x


def dropped(x: Float[Array, "*shape"], rate: float, key: PRNGKeyArray) -> Float[Array, "*shape"]:
    """Zeroes each element with probability `rate` and scales the others up."""
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
