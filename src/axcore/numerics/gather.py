"""Gathering rows of a table, with a gradient that is summed in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


def gather(
    table: Float[Array, "rows features"], ids: Int[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape features"]:
    """`table[ids]`, converted to `dtype`.

    The gradient of a row is summed in float32 over all ids that select it and rounded once, to the dtype of the table.
    A bfloat16 sum of equal terms would stop growing after 256 terms.
    """
    return _gather(np.dtype(dtype), jax.ShapeDtypeStruct(table.shape, table.dtype), table, ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(dtype: np.dtype[np.generic], form: jax.ShapeDtypeStruct, table: jax.Array, ids: jax.Array) -> jax.Array:
    del form
    return table[ids].astype(dtype)


def _forward(
    dtype: np.dtype[np.generic], form: jax.ShapeDtypeStruct, table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _gather(dtype, form, table, ids), ids


def _backward(
    dtype: np.dtype[np.generic], form: jax.ShapeDtypeStruct, ids: jax.Array, g: jax.Array
) -> tuple[jax.Array, None]:
    del dtype
    wide = jax.ShapeDtypeStruct(form.shape, jnp.float32)
    (total,) = jax.linear_transpose(lambda table: table[ids], wide)(g.astype(jnp.float32))
    return total.astype(form.dtype), None


_gather.defvjp(_forward, _backward)
