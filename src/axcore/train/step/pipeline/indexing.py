"""Entries of arrays that are stacked along leading axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def at[T](trees: T, *index: Int[Array, ""] | int) -> T:
    """The entry of each array at this index of its first axes."""

    def entry(x: jax.Array) -> jax.Array:
        shape = x.shape[len(index) :]
        return jax.lax.dynamic_slice(x, _starts(x, index), (1,) * len(index) + shape).reshape(shape)

    return jax.tree.map(entry, trees)


def put[T](trees: T, values: T, *index: Int[Array, ""] | int) -> T:
    """The arrays with another entry at this index of their first axes."""

    def replaced(x: jax.Array, value: jax.Array) -> jax.Array:
        value = jax.lax.expand_dims(value.astype(x.dtype), range(len(index)))
        return jax.lax.dynamic_update_slice(x, value, _starts(x, index))

    return jax.tree.map(replaced, trees, values)


def _starts(x: jax.Array, index: tuple[Int[Array, ""] | int, ...]) -> list[Int[Array, ""]]:
    return [jnp.asarray(start, jnp.int32) for start in (*index, *(0,) * (x.ndim - len(index)))]
