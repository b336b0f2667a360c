"""Grouped products that read each matrix in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import axcore as ax
from axcore.nn import GroupedMatmul, GroupedRequest


class InTurn(GroupedMatmul):
    """Multiplies blocks of rows by the matrices of their groups, one block after another.

    Unlike `Blocks`, which multiplies all blocks at once, it makes no copies of matrices. Sums are in float32.
    """

    size: ax.PositiveInt = 128
    """Number of rows in a block."""

    def supports(self, request: GroupedRequest) -> str | None:
        """None if the request is supported, otherwise the reason."""
        if request.sharded:
            return f"visits blocks in turn, but the rows are sharded over {', '.join(request.sharded)}"
        return "its float32 sums are too coarse for float64" if request.dtype == jnp.float64 else None

    def align(self, rows: int, groups: int) -> int:
        return self.size

    def __call__(
        self,
        x: jax.Array,
        matrices: jax.Array,
        sizes: jax.Array,
        group: jax.Array,
        accumulate: DTypeLike | None = None,
    ) -> jax.Array:
        """See `axcore.nn.GroupedMatmul`.

        Raises:
            ConfigError: the call is not supported.
        """
        if reason := self.supports(GroupedRequest.of(x.dtype, *matrices.shape[1:])):
            raise ax.ConfigError(f"matmul={self!r} {reason}")
        blocks = x.reshape(group.size, -1, x.shape[1])
        return product(accumulate or x.dtype, blocks, matrices, group).reshape(x.shape[0], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(dtype: DTypeLike, blocks: jax.Array, matrices: jax.Array, group: jax.Array) -> jax.Array:
    """[blocks, size, in], [groups, in, out] -> [blocks, size, out]."""

    def one(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, index = block
        return jnp.matmul(rows, matrices[index], preferred_element_type=jnp.float32).astype(dtype)

    return jax.lax.map(one, (blocks, group))


Kept = tuple[jax.Array, jax.Array, jax.Array]


def _forward(dtype: DTypeLike, blocks: jax.Array, matrices: jax.Array, group: jax.Array) -> tuple[jax.Array, Kept]:
    return product(dtype, blocks, matrices, group), (blocks, matrices, group)


def _backward(dtype: DTypeLike, kept: Kept, y_bar: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    blocks, matrices, group = kept

    def step(total: jax.Array, block: Kept) -> tuple[jax.Array, jax.Array]:
        rows, rows_bar, index = block
        part = jnp.matmul(rows.T, rows_bar, preferred_element_type=jnp.float32)
        back = jnp.matmul(rows_bar, matrices[index].T, preferred_element_type=jnp.float32)
        return total.at[index].add(part), back.astype(rows.dtype)

    zeros = jnp.zeros(matrices.shape, jnp.float32)
    total, x_bar = jax.lax.scan(step, zeros, (blocks, y_bar.astype(blocks.dtype), group))
    return x_bar, total.astype(matrices.dtype), None


product.defvjp(_forward, _backward)
