"""How parameters start. Each is a config value, called as `init(key, shape, dtype)`."""

from __future__ import annotations

import math

import jax
from jax.typing import DTypeLike

from axcore.config import Config


class Initializer(Config):
    """Base of initializers."""

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        raise NotImplementedError


class Zeros(Initializer):
    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return jax.numpy.zeros(shape, dtype)


class Ones(Initializer):
    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return jax.numpy.ones(shape, dtype)


class Normal(Initializer):
    """Normal with a fixed standard deviation."""

    stddev: float = 0.02

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return self.stddev * jax.random.normal(key, shape, dtype)


class FanIn(Initializer):
    """Normal with variance `scale / fan_in`, the fan-in being all dimensions but the last (LeCun et al. 1998)."""

    scale: float = 1.0

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return math.sqrt(self.scale / math.prod(shape[:-1])) * jax.random.normal(key, shape, dtype)


class ForEach(Initializer):
    """Initializes each slice of the first dimension by `init`, with that slice's fan-in."""

    init: Initializer

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return jax.vmap(lambda key: self.init(key, shape[1:], dtype))(jax.random.split(key, shape[0]))
