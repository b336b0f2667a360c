"""Dropout (Srivastava et al. 2014, JMLR 15, section 10)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore.config import Config, ConfigError
from axcore.module import Layer


def dropout(layer: Layer, x: jax.Array, rate: float) -> jax.Array:
    """While training, zeroes each element with the chance `rate` and scales up the others; else x as it is.

    To be called by the layer itself: the bits are from its PRNG stream `dropout`.
    """
    return dropped(x, rate, layer.rng("dropout")) if rate and layer.training else x


def dropped(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Any shape -> the same shape and dtype."""
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def check_rates(cfg: Config, *names: str) -> None:
    """Refuses rates outside of [0, 1)."""
    for name in names:
        if not 0 <= getattr(cfg, name) < 1:
            raise ConfigError(f"{name} must be at least 0 and below 1, not {getattr(cfg, name)}")
