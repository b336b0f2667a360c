"""Grouped matrix products: multiply each row of x by the matrix of its group."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from axcore.config import Config, PositiveInt
from axcore.numerics import Product
from axcore.parallel import active_layout, target_device


@dataclasses.dataclass(frozen=True)
class GroupedRequest:
    """A grouped product, or all products of one grouped linear layer. All fields are known at trace time.

    Attributes:
        platform: "cpu", "gpu", "tpu" or another platform of JAX: that of the active layout, or of this process.
        device_kind: the kind of device as JAX names it, such as "NVIDIA H100 80GB HBM3"; empty if unknown.
        dtype: dtype of the rows.
        input_dim, output_dim: sizes of a matrix.
        sharded: the mesh axes over which the compiler may shard the rows; empty inside a `shard_map` over all axes.
        plain: whether the layer only multiplies by its float weight. Numerics and adapters compute further products, of
            other dtypes or sizes.
    """

    platform: str
    device_kind: str
    dtype: np.dtype[np.generic]
    input_dim: int
    output_dim: int
    sharded: tuple[str, ...] = ()
    plain: bool = True

    @classmethod
    def of(cls, dtype: DTypeLike, input_dim: int, output_dim: int, *, plain: bool = True) -> GroupedRequest:
        """The request of a product of these sizes under the active layout."""
        layout = active_layout()
        sharded = () if layout is None else tuple(axis for axis in layout.automatic if layout.mesh.shape[axis] > 1)
        return cls(*target_device(), jnp.dtype(dtype), input_dim, output_dim, sharded, plain)

    def __str__(self) -> str:
        facts = [self.platform, str(self.dtype), f"input_dim={self.input_dim}", f"output_dim={self.output_dim}"]
        facts += [f"rows sharded over {' and '.join(self.sharded)}"] if self.sharded else []
        return ", ".join(facts + ([] if self.plain else ["with numerics or an adapter"]))


class GroupedMatmul(Config):
    """Base of the implementations of grouped matrix products.

    Subclasses implement `__call__`, which must be differentiable in x and the matrices. It may be called by `jax.vmap`,
    in a scan, and again in the backward pass.
    """

    def supports(self, request: GroupedRequest) -> str | None:
        """None if the request is supported, otherwise the reason, of at least three words."""
        return None

    def align(self, rows: int, groups: int) -> int:
        """Each group is padded with rows of zeros to a multiple of this number.

        Args:
            rows: number of rows before padding.
            groups: number of groups.
        """
        return 1

    def __call__(
        self,
        x: Float[Array, "rows input_dim"],
        matrices: Float[Array, "group input_dim output_dim"],
        sizes: Int[Array, " group"],
        group: Int[Array, " blocks"],
        accumulate: DTypeLike | None = None,
    ) -> Float[Array, "rows output_dim"]:
        """Multiplies the first `sizes[0]` rows by the first matrix, the next `sizes[1]` by the second, and so on.

        Args:
            x: the rows, sorted by group.
            matrices: one matrix for each group, in the dtype of x.
            sizes: int32, the number of rows of each group, a multiple of `align`. x may have more rows at the end,
                which are zeros and whose result is zeros.
            group: int32, the group of each block of `align` rows, in ascending order. Blocks at the end without a group
                have the last one.
            accumulate: dtype of the sums and of the result; None: the dtype of x.
        """
        raise NotImplementedError

    def each(
        self,
        x: Float[Array, "rows input_dim"],
        several: Sequence[Float[Array, "group input_dim output_dim"]],
        sizes: Int[Array, " group"],
        group: Int[Array, " blocks"],
        accumulate: DTypeLike | None = None,
    ) -> tuple[Float[Array, "rows output_dim"], ...]:
        """The products of the same rows with several stacks of matrices of equal shape. An implementation may override
        it to add up their gradients of x in one product."""
        return tuple(self(x, matrices, sizes, group, accumulate) for matrices in several)

    def outer(
        self,
        x: Shaped[Array, "rows input_dim"],
        y: Shaped[Array, "rows output_dim"],
        sizes: Int[Array, " group"],
        group: Int[Array, " blocks"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "group input_dim output_dim"]:
        """The outer products of the rows of x and y, summed within each group, by `jax.lax.ragged_dot_general`."""
        return _outer(x, y, sizes, accumulate)


class Blocks(GroupedMatmul):
    """Multiplies each block of rows by a copy of its group's matrix, in one batched matrix product.

    This is fast on every backend. It costs one copy of a matrix per block, and on average half a block of padding per
    group.
    """

    size: PositiveInt | None = None
    """Number of rows in a block; None: about half the average size of a group, as a power of two from 8 to 1024."""

    def align(self, rows: int, groups: int) -> int:
        if self.size is not None:
            return self.size
        return min(1024, max(8, 1 << (max(rows // groups // 2, 1)).bit_length() - 1))

    def __call__(
        self,
        x: Float[Array, "rows input_dim"],
        matrices: Float[Array, "group input_dim output_dim"],
        sizes: Int[Array, " group"],
        group: Int[Array, " blocks"],
        accumulate: DTypeLike | None = None,
    ) -> Float[Array, "rows output_dim"]:
        blocks = x.reshape(group.size, -1, x.shape[1])
        return _of_blocks(accumulate, blocks, matrices, group).reshape(x.shape[0], -1)

    def outer(
        self,
        x: Shaped[Array, "rows input_dim"],
        y: Shaped[Array, "rows output_dim"],
        sizes: Int[Array, " group"],
        group: Int[Array, " blocks"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "group input_dim output_dim"]:
        blocks, y_blocks = (each.reshape(group.size, -1, each.shape[1]) for each in (x, y))
        return _outer_of_blocks(blocks, y_blocks, group, sizes.size, accumulate or jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_blocks(accumulate: DTypeLike | None, x: jax.Array, matrices: jax.Array, group: jax.Array) -> jax.Array:
    """[blocks, size, in] x [groups, in, out] -> [blocks, size, out]."""
    return jnp.einsum("bni,bio->bno", x, matrices[group], preferred_element_type=accumulate)


def _blocks_forward(
    accumulate: DTypeLike | None, x: jax.Array, matrices: jax.Array, group: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _of_blocks(accumulate, x, matrices, group), (x, matrices, group)


def _blocks_backward(
    accumulate: DTypeLike | None, kept: tuple[jax.Array, ...], g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    """Sums the gradients of a group's blocks in float32: a bfloat16 sum would lose small terms."""
    x, matrices, group = kept
    g = g.astype(x.dtype)
    total = _outer_of_blocks(x, g, group, matrices.shape[0], jnp.float32)
    return jnp.einsum("bno,bio->bni", g, matrices[group]), total.astype(matrices.dtype), None


_of_blocks.defvjp(_blocks_forward, _blocks_backward)


def _outer_of_blocks(x: jax.Array, y: jax.Array, group: jax.Array, groups: int, accumulate: DTypeLike) -> jax.Array:
    """[blocks, size, in], [blocks, size, out] -> [groups, in, out]."""
    of_block = jnp.einsum("bni,bno->bio", x, y, preferred_element_type=accumulate)
    return jnp.zeros((groups, *of_block.shape[1:]), accumulate).at[group].add(of_block, indices_are_sorted=True)


class RaggedDot(GroupedMatmul):
    """Grouped products by `jax.lax.ragged_dot`."""

    def __call__(
        self,
        x: Float[Array, "rows input_dim"],
        matrices: Float[Array, "group input_dim output_dim"],
        sizes: Int[Array, " group"],
        group: Int[Array, " blocks"],
        accumulate: DTypeLike | None = None,
    ) -> Float[Array, "rows output_dim"]:
        return _product(accumulate, x, matrices, sizes)


def _dot(x: jax.Array, matrices: jax.Array, sizes: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    @jax.custom_batching.sequential_vmap  # jax batches ragged products along their first dimension only
    def dot(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, matrices, sizes, preferred_element_type=dtype)

    return dot(x, matrices, sizes)


def _outer(x: jax.Array, y: jax.Array, sizes: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Sums the outer products of rows within each group: [rows, in], [rows, out] -> [groups, in, out]."""
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )

    @jax.custom_batching.sequential_vmap
    def outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot_general(x, y, sizes, dimensions, preferred_element_type=dtype)

    return outer(x, y, sizes)


# A function with a custom batching rule has no transpose, so its gradient is given here.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(accumulate: DTypeLike | None, x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    return _dot(x, matrices, sizes, accumulate)


def _forward(
    accumulate: DTypeLike | None, x: jax.Array, matrices: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _product(accumulate, x, matrices, sizes), (x, matrices, sizes)


def _backward(
    accumulate: DTypeLike | None, kept: tuple[jax.Array, ...], g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, matrices, sizes = kept
    g = g.astype(x.dtype)
    return _dot(g, matrices.swapaxes(1, 2), sizes), _outer(x, g, sizes), None


_product.defvjp(_forward, _backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped(Product):
    """Rows sorted by group, each multiplied by the matrix of its group: [rows, in] x [group, in, out] -> [rows, out].

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
        """Groups of these sizes, which add up to `rows`. `RaggedDot` computes their product."""
        group = jnp.repeat(jnp.arange(sizes.size, dtype=jnp.int32), sizes, total_repeat_length=rows)
        return cls(sizes, group, rows)

    def __call__(
        self,
        x: Float[Array, "rows input_dim"],
        weight: Float[Array, "group input_dim output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Float[Array, "rows output_dim"]:
        return self.matmul(x, weight.astype(x.dtype), self.sizes, self.group, accumulate)

    def each(
        self,
        x: Float[Array, "rows input_dim"],
        several: Sequence[Float[Array, "group input_dim output_dim"]],
        accumulate: DTypeLike | None = None,
    ) -> tuple[Float[Array, "rows output_dim"], ...]:
        """The products of the same rows with several weights of equal shape."""
        return self.matmul.each(x, [weight.astype(x.dtype) for weight in several], self.sizes, self.group, accumulate)

    def input_gradient(
        self,
        y_bar: Shaped[Array, "rows output_dim"],
        weight: Shaped[Array, "group input_dim output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "rows input_dim"]:
        return self(y_bar, weight.swapaxes(1, 2), accumulate)

    def weight_gradient(
        self,
        x: Shaped[Array, "rows input_dim"],
        y_bar: Shaped[Array, "rows output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "group input_dim output_dim"]:
        return self.matmul.outer(x, y_bar, self.sizes, self.group, accumulate)

    def broadcast(self, values: Float[Array, "group output_dim"]) -> Float[Array, "rows output_dim"]:
        of_block = jnp.broadcast_to(
            values[self.group][:, None], (self.group.size, self.rows // self.group.size, values.shape[1])
        )
        return of_block.reshape(self.rows, values.shape[1])

    def largest(self, values: Float[Array, "rows output_dim"]) -> Float[Array, "group output_dim"]:
        """-inf for a group without rows."""
        of_block = values.reshape(self.group.size, -1, values.shape[1]).max(1)
        return jax.ops.segment_max(of_block, self.group, self.sizes.size, indices_are_sorted=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batched(Product):
    """The same number of rows for each group: [group, rows, in] x [group, in, out] -> [group, rows, out]."""

    def __call__(
        self,
        x: Float[Array, "group rows input_dim"],
        weight: Float[Array, "group input_dim output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Float[Array, "group rows output_dim"]:
        return jnp.einsum("gni,gio->gno", x, weight.astype(x.dtype), preferred_element_type=accumulate)

    def input_gradient(
        self,
        y_bar: Shaped[Array, "group rows output_dim"],
        weight: Shaped[Array, "group input_dim output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "group rows input_dim"]:
        return self(y_bar, weight.swapaxes(1, 2), accumulate)

    def weight_gradient(
        self,
        x: Shaped[Array, "group rows input_dim"],
        y_bar: Shaped[Array, "group rows output_dim"],
        accumulate: DTypeLike | None = None,
    ) -> Shaped[Array, "group input_dim output_dim"]:
        return jnp.einsum("gni,gno->gio", x, y_bar, preferred_element_type=accumulate)

    def broadcast(self, values: Float[Array, "group output_dim"]) -> Float[Array, "group 1 output_dim"]:
        return values[:, None]

    def largest(self, values: Float[Array, "group rows output_dim"]) -> Float[Array, "group output_dim"]:
        """-inf for a group without rows."""
        return values.max(1, initial=-jnp.inf)
