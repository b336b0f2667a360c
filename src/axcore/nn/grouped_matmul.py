"""Grouped matrix products: each row of x is multiplied with the matrix of its group."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from axcore.config import Config, at_least
from axcore.numerics import Product


class GroupedMatmul(Config):
    """Base of the implementations of grouped matrix products."""

    def align(self, rows: int, groups: int) -> int:
        """The multiple that the size of each group is padded to, with rows of zeros.

        Args:
            rows: number of rows before padding.
            groups: number of groups.
        """
        return 1

    def __call__(
        self,
        x: jax.Array,
        matrices: jax.Array,
        sizes: jax.Array,
        group: jax.Array,
        accumulate: DTypeLike | None = None,
    ) -> jax.Array:
        """Multiplies the first `sizes[0]` rows with the first matrix, the next `sizes[1]` with the second, and so on.

        Args:
            x: [rows, in].
            matrices: [groups, in, out], in the dtype of x.
            sizes: int32 [groups], multiples of `align`. Their sum is `rows` if `align` is 1; otherwise further rows, of
                zeros, may follow.
            group: int32 [rows / align], the group of each block of `align` rows.
            accumulate: dtype of the sums and of the result; None: the dtype of x.

        Returns:
            [rows, out].
        """
        raise NotImplementedError


class Blocks(GroupedMatmul):
    """Multiplies each block of rows with a copy of its group's matrix, in one batched matrix product.

    It is fast on every backend. It costs the copies of the matrices, and padding of half a block per group on average.
    """

    size: int | None = None
    """Rows of a block; None: about half the average size of a group, as a power of two from 8 to 1024."""

    def __post_init__(self) -> None:
        at_least(self, 1, "size")

    def align(self, rows: int, groups: int) -> int:
        if self.size is not None:
            return self.size
        return min(1024, max(8, 1 << (max(rows // groups // 2, 1)).bit_length() - 1))

    def __call__(
        self,
        x: jax.Array,
        matrices: jax.Array,
        sizes: jax.Array,
        group: jax.Array,
        accumulate: DTypeLike | None = None,
    ) -> jax.Array:
        blocks = x.reshape(group.size, -1, x.shape[1])
        return _of_blocks(accumulate, blocks, matrices, group).reshape(x.shape[0], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_blocks(accumulate: Any, x: jax.Array, matrices: jax.Array, group: jax.Array) -> jax.Array:
    """[blocks, size, in] x [groups, in, out] -> [blocks, size, out]."""
    return jnp.einsum("bni,bio->bno", x, matrices[group], preferred_element_type=accumulate)


def _blocks_forward(
    accumulate: Any, x: jax.Array, matrices: jax.Array, group: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _of_blocks(accumulate, x, matrices, group), (x, matrices, group)


def _blocks_backward(accumulate: Any, kept: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """Sums the gradients of a group's blocks in float32: a bfloat16 sum would lose small summands."""
    x, matrices, group = kept
    g = g.astype(x.dtype)
    of_block = jnp.einsum("bni,bno->bio", x, g, preferred_element_type=jnp.float32)
    total = jnp.zeros(matrices.shape, jnp.float32).at[group].add(of_block, indices_are_sorted=True)
    return jnp.einsum("bno,bio->bni", g, matrices[group]), total.astype(matrices.dtype), None


_of_blocks.defvjp(_blocks_forward, _blocks_backward)


class RaggedDot(GroupedMatmul):
    """Grouped products by `jax.lax.ragged_dot`."""

    def __call__(
        self,
        x: jax.Array,
        matrices: jax.Array,
        sizes: jax.Array,
        group: jax.Array,
        accumulate: DTypeLike | None = None,
    ) -> jax.Array:
        return _product(accumulate, x, matrices, sizes)


def _dot(x: jax.Array, matrices: jax.Array, sizes: jax.Array, dtype: Any = None) -> jax.Array:
    @jax.custom_batching.sequential_vmap  # jax batches ragged products along their first dimension only
    def dot(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, matrices, sizes, preferred_element_type=dtype)

    return dot(x, matrices, sizes)


@jax.custom_batching.sequential_vmap
def _outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sums the outer products of rows within each group: [rows, in], [rows, out] -> [groups, in, out]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(x, y, sizes, dimensions)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))  # a function with a custom batching rule has no transpose
def _product(accumulate: Any, x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    return _dot(x, matrices, sizes, accumulate)


def _forward(
    accumulate: Any, x: jax.Array, matrices: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _product(accumulate, x, matrices, sizes), (x, matrices, sizes)


def _backward(accumulate: Any, kept: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, matrices, sizes = kept
    g = g.astype(x.dtype)
    return _dot(g, matrices.swapaxes(1, 2), sizes), _outer(x, g, sizes), None


_product.defvjp(_forward, _backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped(Product):
    """Rows sorted by group, each times the matrix of its group: [rows, in] x [group, in, out] -> [rows, out].

    Attributes:
        sizes: number of rows of each group; see `GroupedMatmul`.
        group: the group of each block of `rows / blocks` rows, in ascending order.
        rows: number of rows.
        matmul: the implementation.
    """

    sizes: Int[Array, " group"]
    group: Int[Array, " blocks"]
    rows: int = dataclasses.field(metadata={"static": True})
    matmul: GroupedMatmul = dataclasses.field(default=RaggedDot(), metadata={"static": True})

    @classmethod
    def of(cls, sizes: Int[Array, " group"], rows: int) -> Grouped:
        """Groups of any sizes, whose sum is `rows`, by `RaggedDot`."""
        group = jnp.repeat(jnp.arange(sizes.size, dtype=jnp.int32), sizes, total_repeat_length=rows)
        return cls(sizes, group, rows)

    def __call__(self, x: jax.Array, weight: jax.Array, accumulate: DTypeLike | None = None) -> jax.Array:
        return self.matmul(x, weight.astype(x.dtype), self.sizes, self.group, accumulate)

    def broadcast(self, values: jax.Array) -> jax.Array:
        of_block = jnp.broadcast_to(
            values[self.group][:, None], (self.group.size, self.rows // self.group.size, values.shape[1])
        )
        return of_block.reshape(self.rows, values.shape[1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batched(Product):
    """The same number of rows for each group: [group, rows, in] x [group, in, out] -> [group, rows, out]."""

    def __call__(self, x: jax.Array, weight: jax.Array, accumulate: DTypeLike | None = None) -> jax.Array:
        return jnp.einsum("gni,gio->gno", x, weight.astype(x.dtype), preferred_element_type=accumulate)

    def broadcast(self, values: jax.Array) -> jax.Array:
        return values[:, None]
