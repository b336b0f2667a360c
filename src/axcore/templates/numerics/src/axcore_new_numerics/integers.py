"""Vector-wise quantized products (LLM.int8, Dettmers et al. 2022, arXiv 2208.07339, section 2.1)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.numerics import Numerics, Product, Weight


class Integers(Numerics):
    """Products of integers, with one scale per row of x, computed in each call, and one per output of the weight.

    In training, the weight is a float parameter that is rounded in each call. The backward pass treats rounding as the
    identity (straight-through; Bengio et al. 2013, arXiv 1308.3432). For inference, the weight is stored as `codes`
    (int8) and `scales` (float32).
    """

    class Config(Numerics.Config):
        bits: Annotated[int, ax.Range(at_least=2, at_most=8)] = 8
        """Number of bits from 2 to 8, including the sign. Codes are always stored as int8."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.largest = 2 ** (cfg.bits - 1) - 1

    def encode(self, weight: jax.Array) -> dict[str, jax.Array]:
        codes, scales = rounded(weight, self.config.input_axis, self.largest)
        return {"codes": codes, "scales": scales}

    def decode(self, stored: Mapping[str, jax.Array]) -> jax.Array:
        return stored["codes"] * stored["scales"]

    def matrix(self, weight: Weight) -> jax.Array:
        """The rounded weight that products use. Gradients pass through to the float weight."""
        if isinstance(weight, Mapping):
            return self.decode(weight)
        return weight + jax.lax.stop_gradient(self.decode(self.encode(weight)).astype(weight.dtype) - weight)

    def __call__(self, x: jax.Array, weight: Weight, product: Product) -> jax.Array:
        stored = weight if isinstance(weight, Mapping) else self.encode(jax.lax.stop_gradient(weight))
        scales = stored["scales"].squeeze(self.config.input_axis)
        return integer_product(self.largest, x, self.matrix(weight), stored["codes"], scales, product)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def integer_product(
    largest: int, x: jax.Array, weight: jax.Array, codes: jax.Array, scales: jax.Array, product: Product
) -> jax.Array:
    """Rounds x to integers from `-largest` to `largest` and multiplies them by the codes, with int32 sums.

    Args:
        weight: the float weight, used only by the backward pass.
        scales: float32, one per output.
    """
    x_codes, x_scales = rounded(x, -1, largest)
    sums = product(x_codes, codes, jnp.int32)
    return (sums.astype(jnp.float32) * x_scales * product.broadcast(scales)).astype(x.dtype)


def rounded(x: jax.Array, axis: int, largest: int) -> tuple[jax.Array, jax.Array]:
    """int8 codes in the shape of x and a float32 scale per vector along the axis, with `x ~ codes * scale`."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(axis, keepdims=True) / largest
    scale = jnp.where(scale == 0, 1.0, scale)  # a vector of zeros
    return jnp.round(x / scale).astype(jnp.int8), scale


def _forward(
    largest: int, x: jax.Array, weight: jax.Array, codes: jax.Array, scales: jax.Array, product: Product
) -> tuple[jax.Array, Any]:
    return integer_product(largest, x, weight, codes, scales, product), (x, weight, product)


def _backward(largest: int, kept: Any, y_bar: jax.Array) -> tuple[Any, ...]:
    x, weight, product = kept
    x_bar, weight_bar = jax.vjp(product, x, weight)[1](y_bar)
    return x_bar, weight_bar, None, None, None


integer_product.defvjp(_forward, _backward)
