"""The product of rows with the matrices of their groups."""

from __future__ import annotations

import jax

import axcore as ax
from axcore.config import Config


class GroupedMatmul(Config):
    """Base of grouped matrix products."""

    def __call__(self, x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        """[rows, in] x [groups, in, out] -> [rows, out], the first `sizes[0]` rows with the first matrix, and so on.

        Args:
            sizes: int32 [groups]; they add up to the number of rows.
        """
        raise NotImplementedError


class RaggedDot(GroupedMatmul):
    """`jax.lax.ragged_dot`: runs on every backend."""

    def __call__(self, x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        return _product(x, matrices, sizes)


@jax.custom_batching.sequential_vmap  # jax maps ragged products over nothing but their first dimension
def _dot(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x, matrices, sizes)


@jax.custom_batching.sequential_vmap
def _outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """The sum of outer products of each group's rows: [rows, in], [rows, out] -> [groups, in, out]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(x, y, sizes, dimensions)


@jax.custom_vjp  # since what is mapped in a way of its own has no transpose
def _product(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    return _dot(x, matrices, sizes)


def _forward(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _dot(x, matrices, sizes), (x, matrices, sizes)


def _backward(kept: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, matrices, sizes = kept
    return _dot(g, matrices.swapaxes(1, 2), sizes), _outer(x, g, sizes), None


_product.defvjp(_forward, _backward)


class Tokamax(GroupedMatmul):
    """`tokamax.ragged_dot`: kernels for GPUs and TPUs, and its own fallback elsewhere."""

    def __call__(self, x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        try:
            import tokamax
        except ImportError as error:
            raise ax.ConfigError(f"the grouped product Tokamax needs tokamax (pip install tokamax): {error}") from error
        return tokamax.ragged_dot(x, matrices, sizes)
