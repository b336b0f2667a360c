"""The product of activations with a weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axcore.parallel import is_sharded


def rows(x: jax.Array) -> jax.Array:
    """[..., features] -> [n, features] on one device; unchanged where activations may be sharded.

    The gradient of a weight then contracts one dimension, and XLA needs no transposed copy of x (1.6x faster forward
    and backward of a feed-forward block on CPU). Merging a sharded dimension could cost a collective, so there it is
    left to the compiler. A layer that multiplies one x with several weights merges once, or the backward pass would
    keep a copy for each.
    """
    return x if is_sharded() or x.ndim == 2 else x.reshape(-1, x.shape[-1])


def matmul(x: jax.Array, weight: jax.Array, accumulate: DTypeLike | None = None) -> jax.Array:
    """[..., in] x [in, out] -> [..., out], in the dtype of x, or in that of the sums where it is given."""
    y = jnp.matmul(rows(x), weight.astype(x.dtype), preferred_element_type=accumulate)
    return y.reshape(*x.shape[:-1], weight.shape[-1])
