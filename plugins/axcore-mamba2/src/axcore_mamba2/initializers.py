"""Initializers of decay rates and step sizes, as in the published code (github.com/state-spaces/mamba)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import axcore as ax
from axcore.nn import Initializer


class LogRates(Initializer):
    """The logarithm of decay rates that are uniform from `low` to `high`."""

    low: ax.PositiveFloat = 1.0
    high: ax.PositiveFloat = 16.0

    def __post_init__(self) -> None:
        _check_range(self)

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        return jnp.log(jax.random.uniform(key, shape, minval=self.low, maxval=self.high)).astype(dtype)


class StepBias(Initializer):
    """The inverse softplus of step sizes that are log-uniform from `low` to `high`, and at least `floor`.

    The step size of a token is then in this range if the projection of the token is near 0.
    """

    low: ax.PositiveFloat = 1e-3
    high: ax.PositiveFloat = 0.1
    floor: ax.NonNegativeFloat = 1e-4

    def __post_init__(self) -> None:
        _check_range(self)

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
        logs = jax.random.uniform(key, shape, minval=math.log(self.low), maxval=math.log(self.high))
        steps = jnp.maximum(jnp.exp(logs), self.floor)
        return (steps + jnp.log(-jnp.expm1(-steps))).astype(dtype)


def _check_range(init: LogRates | StepBias) -> None:
    if init.low > init.high:
        raise ax.ConfigError(f"low must be at most high, not {init.low} and {init.high}")
