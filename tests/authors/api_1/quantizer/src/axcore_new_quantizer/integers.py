"""Matrix products of small integers (LLM.int8, Dettmers et al. 2022, arXiv 2208.07339, section 2.1: vector-wise)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import axcore as ax


class Integers(ax.Layer):
    """`x @ weight` from integers: a scale for each token of x and for each output of the weight, found in each call.

    The backward pass takes the rounding as the identity (straight-through; Bengio et al. 2013, arXiv 1308.3432), so
    its gradients are those of the exact product, and parameters stay in their own number type.
    """

    class Config(ax.Layer.Config):
        bits: int = 8
        """From 2 to 8, the sign included. All are stored as int8; fewer only round more."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        del rngs  # no parameters
        if not 2 <= cfg.bits <= 8:
            raise ax.ConfigError(f"bits must be from 2 to 8, not {cfg.bits}")

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """[..., input_dim] x [input_dim, output_dim] -> [..., output_dim], in the dtype of x."""
        return integer_matmul(x, weight, 2 ** (self.config.bits - 1) - 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def integer_matmul(x: jax.Array, weight: jax.Array, largest: int) -> jax.Array:
    """The product of both as integers from `-largest` to `largest`, which are added up in int32."""
    (x_int, x_unit), (weight_int, weight_unit) = rounded(x, -1, largest), rounded(weight, 0, largest)
    product = jnp.matmul(x_int, weight_int, preferred_element_type=jnp.int32)
    return (product.astype(jnp.float32) * x_unit * weight_unit).astype(x.dtype)


def rounded(x: jax.Array, axis: int, largest: int) -> tuple[jax.Array, jax.Array]:
    """(int8 of the shape of x, float32 unit of each vector along the axis): `x ~ integers * unit`."""
    x = x.astype(jnp.float32)
    unit = jnp.abs(x).max(axis, keepdims=True) / largest
    unit = jnp.where(unit == 0, 1.0, unit)  # a vector of zeros
    return jnp.round(x / unit).astype(jnp.int8), unit


def _forward(x: jax.Array, weight: jax.Array, largest: int) -> tuple[jax.Array, Any]:
    return integer_matmul(x, weight, largest), (x, weight)


def _backward(largest: int, kept: Any, y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    x_bar = jnp.matmul(y_bar, weight.T.astype(y_bar.dtype))
    weight_bar = jnp.einsum("...i,...o->io", x, y_bar, preferred_element_type=jnp.float32)
    return x_bar.astype(x.dtype), weight_bar.astype(weight.dtype)


integer_matmul.defvjp(_forward, _backward)
