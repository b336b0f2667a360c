"""Products of activations with one matrix."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axcore.numerics import Product
from axcore.parallel import is_sharded


def rows(x: jax.Array) -> jax.Array:
    """[..., features] -> [n, features] on one device; unchanged where activations may be sharded.

    The gradient of a weight then contracts one dimension, and XLA needs no transposed copy of x (forward and backward
    of a feed-forward block are 1.6x faster on CPU). Merging a sharded dimension could cost a collective, so it is left
    to the compiler. A layer that multiplies one x with several weights should merge once, or the backward pass keeps a
    copy of x for each.
    """
    return x if is_sharded() or x.ndim == 2 else x.reshape(-1, x.shape[-1])


def matmul(x: jax.Array, weight: jax.Array, accumulate: DTypeLike | None = None) -> jax.Array:
    """[..., in] x [in, out] -> [..., out], in the dtype `accumulate`, or that of x if it is None."""
    y = jnp.matmul(rows(x), weight.astype(x.dtype), preferred_element_type=accumulate)
    return y.reshape(*x.shape[:-1], weight.shape[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plain(Product):
    """`x @ weight` with one matrix [in, out]: a linear map."""

    def __call__(self, x: jax.Array, weight: jax.Array, accumulate: DTypeLike | None = None) -> jax.Array:
        return matmul(x, weight, accumulate)

    def broadcast(self, values: jax.Array) -> jax.Array:
        return values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed(Plain):
    """`x @ weight.T` with one matrix [out, in]: an output head that is tied to the embedding."""

    def __call__(self, x: jax.Array, weight: jax.Array, accumulate: DTypeLike | None = None) -> jax.Array:
        return matmul(x, weight.T, accumulate)
