"""The product of activations with a weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axcore.parallel import is_sharded


def matmul(x: jax.Array, weight: jax.Array, accumulate: DTypeLike | None = None) -> jax.Array:
    """[..., in] x [in, out] -> [..., out], in the dtype of x, or in that of the sums where it is given.

    On one device the leading dimensions are merged first: the gradient of the weight then contracts one dimension, and
    XLA needs no transposed copy of x (1.6x faster forward and backward of a feed-forward block on CPU). Where
    activations are sharded, merging a sharded dimension could cost a collective, so it is left to the compiler.
    """
    weight = weight.astype(x.dtype)
    if is_sharded():
        return jnp.matmul(x, weight, preferred_element_type=accumulate)
    rows = jnp.matmul(x.reshape(-1, x.shape[-1]), weight, preferred_element_type=accumulate)
    return rows.reshape(*x.shape[:-1], weight.shape[-1])
