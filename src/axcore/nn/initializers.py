"""Initializers of parameters: config values that are called as `init(key, shape, dtype)`."""

from __future__ import annotations

import math

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from axcore.config import Config, NonNegativeFloat


class Initializer(Config):
    """Base of initializers."""

    def __call__(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "*shape"]:
        """The initial value of a parameter."""
        raise NotImplementedError


class Zeros(Initializer):
    """Zeros."""

    def __call__(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "*shape"]:
        return jax.numpy.zeros(shape, dtype)


class Ones(Initializer):
    """Ones."""

    def __call__(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "*shape"]:
        return jax.numpy.ones(shape, dtype)


class Normal(Initializer):
    """A normal distribution with a fixed standard deviation."""

    stddev: NonNegativeFloat = 0.02

    def __call__(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "*shape"]:
        return self.stddev * jax.random.normal(key, shape, dtype)


class FanIn(Initializer):
    """A normal distribution with variance `scale / fan_in` (LeCun et al. 1998). The fan-in is the product of all
    dimensions but the last."""

    scale: NonNegativeFloat = 1.0

    def __call__(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "*shape"]:
        return math.sqrt(self.scale / math.prod(shape[:-1])) * jax.random.normal(key, shape, dtype)


class ForEach(Initializer):
    """Initializes each slice of the first dimension by `init`, with that slice's fan-in."""

    init: Initializer

    def __call__(self, key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "*shape"]:
        return jax.vmap(lambda key: self.init(key, shape[1:], dtype))(jax.random.split(key, shape[0]))
