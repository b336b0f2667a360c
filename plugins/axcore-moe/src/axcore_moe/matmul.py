"""The product of rows with the matrices of their groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import axcore as ax
from axcore.config import Config, at_least


class GroupedMatmul(Config):
    """Base of grouped matrix products."""

    def align(self, rows: int, groups: int) -> int:
        """Groups start at multiples of this, and have so many rows; those that no token fills are zeros.

        Args:
            rows: how many there are, without those.
        """
        return 1

    def __call__(self, x: jax.Array, matrices: jax.Array, sizes: jax.Array, group: jax.Array) -> jax.Array:
        """[rows, in] x [groups, in, out] -> [rows, out], the first `sizes[0]` rows with the first matrix, and so on.

        Args:
            sizes: int32 [groups], multiples of `align`. Where that is 1 they add up to the number of rows; else there
                may be more rows, of zeros.
            group: int32 [rows / align], the group of each `align` rows.
        """
        raise NotImplementedError


class Blocks(GroupedMatmul):
    """Each block of rows with a copy of its group's matrix, in one batched product. It is fast wherever matrix products
    are; the price is the copies, and rows that are empty: half a block for each group on average."""

    size: int | None = None
    """Rows of a block; None: half of what a group has on average, from 8 to 1024, as a power of two."""

    def __post_init__(self) -> None:
        at_least(self, 1, "size")

    def align(self, rows: int, groups: int) -> int:
        if self.size is not None:
            return self.size
        return min(1024, max(8, 1 << (max(rows // groups // 2, 1)).bit_length() - 1))

    def __call__(self, x: jax.Array, matrices: jax.Array, sizes: jax.Array, group: jax.Array) -> jax.Array:
        blocks = x.reshape(group.size, -1, x.shape[1])
        return _of_blocks(blocks, matrices, group).reshape(x.shape[0], -1)


@jax.custom_vjp
def _of_blocks(x: jax.Array, matrices: jax.Array, group: jax.Array) -> jax.Array:
    """[blocks, size, in] x [groups, in, out] -> [blocks, size, out]."""
    return jnp.einsum("bni,bio->bno", x, matrices[group])


def _blocks_forward(x: jax.Array, matrices: jax.Array, group: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _of_blocks(x, matrices, group), (x, matrices, group)


def _blocks_backward(kept: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """The blocks of a group are added up in float32: bfloat16 would lose what each adds."""
    x, matrices, group = kept
    of_block = jnp.einsum("bni,bno->bio", x, g, preferred_element_type=jnp.float32)
    total = jnp.zeros(matrices.shape, jnp.float32).at[group].add(of_block, indices_are_sorted=True)
    return jnp.einsum("bno,bio->bni", g, matrices[group]), total.astype(matrices.dtype), None


_of_blocks.defvjp(_blocks_forward, _blocks_backward)


class RaggedDot(GroupedMatmul):
    """`jax.lax.ragged_dot`: runs on every backend."""

    def __call__(self, x: jax.Array, matrices: jax.Array, sizes: jax.Array, group: jax.Array) -> jax.Array:
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

    def __call__(self, x: jax.Array, matrices: jax.Array, sizes: jax.Array, group: jax.Array) -> jax.Array:
        try:
            import tokamax  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise ax.ConfigError(f"the grouped product Tokamax needs tokamax (pip install tokamax): {error}") from error
        return tokamax.ragged_dot(x, matrices, sizes)
