"""The product of rows with the matrices of their groups."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axcore.config import Config, at_least
from axcore.numerics import Product


class GroupedMatmul(Config):
    """Base of grouped matrix products."""

    def align(self, rows: int, groups: int) -> int:
        """Groups start at multiples of this, and have so many rows; those that no token fills are zeros.

        Args:
            rows: how many there are, without those.
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
        """[rows, in] x [groups, in, out] -> [rows, out], the first `sizes[0]` rows with the first matrix, and so on.

        Args:
            matrices: in the dtype of x.
            sizes: int32 [groups], multiples of `align`. Where that is 1 they add up to the number of rows; else there
                may be more rows, of zeros.
            group: int32 [rows / align], the group of each `align` rows.
            accumulate: dtype of the sums and of the result; None: that of x.
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
    """The blocks of a group are added up in float32: bfloat16 would lose what each adds."""
    x, matrices, group = kept
    g = g.astype(x.dtype)
    of_block = jnp.einsum("bni,bno->bio", x, g, preferred_element_type=jnp.float32)
    total = jnp.zeros(matrices.shape, jnp.float32).at[group].add(of_block, indices_are_sorted=True)
    return jnp.einsum("bno,bio->bni", g, matrices[group]), total.astype(matrices.dtype), None


_of_blocks.defvjp(_blocks_forward, _blocks_backward)


class RaggedDot(GroupedMatmul):
    """`jax.lax.ragged_dot`: runs on every backend."""

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
    @jax.custom_batching.sequential_vmap  # jax maps ragged products over nothing but their first dimension
    def dot(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, matrices, sizes, preferred_element_type=dtype)

    return dot(x, matrices, sizes)


@jax.custom_batching.sequential_vmap
def _outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """The sum of outer products of each group's rows: [rows, in], [rows, out] -> [groups, in, out]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(x, y, sizes, dimensions)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))  # since what is mapped in a way of its own has no transpose
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
    """Rows of several groups, those of the first group first: [rows, in] x [group, in, out] -> [rows, out].

    Attributes:
        sizes: int32 [groups], the rows of each; see `GroupedMatmul`.
        group: int32 [blocks] in ascending order, the group of each block of as many rows.
        rows: how many there are.
        matmul: computes the products.
    """

    sizes: jax.Array
    group: jax.Array
    rows: int = dataclasses.field(metadata={"static": True})
    matmul: GroupedMatmul = dataclasses.field(default=RaggedDot(), metadata={"static": True})

    @classmethod
    def of(cls, sizes: jax.Array, rows: int) -> Grouped:
        """Groups of any sizes, which add up to `rows`."""
        group = jnp.repeat(jnp.arange(sizes.size, dtype=jnp.int32), sizes, total_repeat_length=rows)
        return cls(sizes, group, rows)

    def __call__(self, x: jax.Array, weight: jax.Array, accumulate: DTypeLike | None = None) -> jax.Array:
        return self.matmul(x, weight.astype(x.dtype), self.sizes, self.group, accumulate)

    def each(self, values: jax.Array) -> jax.Array:
        of_block = jnp.broadcast_to(
            values[self.group][:, None], (self.group.size, self.rows // self.group.size, values.shape[1])
        )
        return of_block.reshape(self.rows, values.shape[1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batched(Product):
    """As many rows for each group: [group, rows, in] x [group, in, out] -> [group, rows, out]."""

    def __call__(self, x: jax.Array, weight: jax.Array, accumulate: DTypeLike | None = None) -> jax.Array:
        return jnp.einsum("gni,gio->gno", x, weight.astype(x.dtype), preferred_element_type=accumulate)

    def each(self, values: jax.Array) -> jax.Array:
        return values[:, None]
