"""Pallas Mosaic-GPU kernels of grouped matrix products for Hopper (sm90).

Both kernels are persistent: each multiprocessor computes every n-th tile of the result. One warpgroup copies tiles of
the operands to shared memory, through a ring of stages that spans the tiles of the result, and two warpgroups multiply
them and write the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

plgpu: Any = mosaic_gpu  # its annotations reject correct calls
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block of a Hopper GPU may use."""
_EPILOGUE = 64
"""Rows and columns of the tiles through which results are written."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel divides its work.

    Attributes:
        m, n: rows and columns of a tile of the result: multiples of 64, one of them of 128.
        k: length of the part of the contracted dimension that one stage holds, a multiple of 64.
        stages: number of stages in shared memory.
        width: number of neighboring tiles along n (along m, if negative) that are computed before moving along the
            other dimension, so that operands are found in the L2 cache.
        split_m: whether the two warpgroups divide a tile along m, rather than along n.
    """

    m: int
    n: int
    k: int
    stages: int
    width: int
    split_m: bool

    @property
    def warpgroup(self) -> tuple[int, int]:
        """Rows and columns of the part of a tile that one warpgroup computes."""
        return (self.m // 2, self.n) if self.split_m else (self.m, self.n // 2)

    def part(self, index: Any) -> tuple[Any, Any]:
        """Slices of the rows and columns of a warpgroup's part."""
        m, n = self.warpgroup
        if self.split_m:
            return pl.ds(index * m, m), pl.ds(0, n)
        return pl.ds(0, m), pl.ds(index * n, n)

    def position(self, index: Any, shape: tuple[Any, Any]) -> tuple[Any, Any]:
        """The tile that is computed at a step, of a grid of this shape."""
        return plgpu.planar_snake(index, shape, 0 if self.width < 0 else 1, abs(self.width))


def rows_product(
    terms: Sequence[tuple[Float[Array, "rows k"], Float[Array, "group k n"] | Float[Array, "group n k"]]],
    group: Int[Array, " blocks"],
    *,
    tiling: Tiling,
    transposed: bool,
    dtype: DTypeLike,
    multiprocessors: int,
    interpret: Any = False,
) -> Float[Array, "rows n"]:
    """Multiplies each block of `tiling.m` rows by the matrix of its group, and adds up the terms.

    Args:
        terms: rows and matrices, of the same sizes in each term. The matrices are [group, n, k] if `transposed`.
        group: int32, the group of each block; the number of groups for a block whose result is zeros.
        dtype: dtype of the result. Sums are in float32.
    """
    x, matrices = terms[0]
    rows, depth = x.shape
    columns = matrices.shape[1 if transposed else 2]
    blocks, across, steps = rows // tiling.m, pl.cdiv(columns, tiling.n), pl.cdiv(depth, tiling.k)
    groups = matrices.shape[0]

    def tile(index: Any, group_ref: Any) -> tuple[Any, Any, Any, Any]:
        row, column = tiling.position(index, (blocks, across))
        owner = group_ref[row]
        return row, column, owner, jnp.where(owner < groups, jnp.int32(len(terms) * steps), jnp.int32(0))

    def load(at: Any, step: Any, refs: Any, buffers: Any, barrier: Any) -> None:
        for term in range(len(terms)):
            copy = functools.partial(load_term, at, step - term * steps, refs[2 * term : 2 * term + 2])
            if len(terms) == 1:
                copy(buffers, barrier)
            else:
                pl.when((step >= term * steps) & (step < (term + 1) * steps))(functools.partial(copy, buffers, barrier))

    def load_term(at: Any, step: Any, refs: Any, buffers: Any, barrier: Any) -> None:
        row, column, owner, _ = at
        x_ref, matrices_ref = refs
        inner, outer = pl.ds(step * tiling.k, tiling.k), pl.ds(column * tiling.n, tiling.n)
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row * tiling.m, tiling.m), inner], buffers[0], barrier)
        part = (owner, outer, inner) if transposed else (owner, inner, outer)
        plgpu.copy_gmem_to_smem(matrices_ref.at[part], buffers[1], barrier)

    def multiply(acc: Any, left: Any, right: Any, part: tuple[Any, Any]) -> None:
        m, n = part
        right = right.at[n].transpose((1, 0)) if transposed else right.at[:, n]
        plgpu.wgmma(acc, left.at[m], right)

    def target(at: Any, out_ref: Any) -> Any:
        return out_ref.at[pl.ds(at[0] * tiling.m, tiling.m), pl.ds(at[1] * tiling.n, tiling.n)]

    read = [operand for term in terms for operand in term]
    kernel = _persistent(
        tiling,
        tiles=blocks * across,
        shapes=((tiling.m, tiling.k), (tiling.n, tiling.k) if transposed else (tiling.k, tiling.n)),
        operand=x.dtype,
        result=jax.ShapeDtypeStruct((rows, columns), dtype),
        tile=lambda index, refs: tile(index, refs[-1]),
        load=load,
        multiply=multiply,
        target=target,
        multiprocessors=multiprocessors,
        interpret=interpret,
        cost=_cost(rows, columns, len(terms) * depth, read, dtype, rows * columns),
        name="grouped_rows_transposed" if transposed else "grouped_rows",
    )
    return kernel(*read, group)


def groups_product(
    x: Float[Array, "rows m"],
    y: Float[Array, "rows n"],
    ends: Int[Array, " group"],
    *,
    tiling: Tiling,
    dtype: DTypeLike,
    multiprocessors: int,
    interpret: Any = False,
) -> Float[Array, "group m n"]:
    """Sums the outer products of rows within each group.

    Args:
        ends: int32, the end of the rows of each group, a multiple of `tiling.k`. The first group starts at row 0, each
            other group where the previous one ends.
        dtype: dtype of the result. Sums are in float32. The result of an empty group is zeros.
    """
    groups, down, across = ends.size, pl.cdiv(x.shape[1], tiling.m), pl.cdiv(y.shape[1], tiling.n)
    starts = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1]])
    first, steps = starts // tiling.k, (ends - starts) // tiling.k

    def tile(index: Any, refs: Any) -> tuple[Any, Any, Any, Any, Any]:
        owner, rest = lax.div(index, jnp.int32(down * across)), lax.rem(index, jnp.int32(down * across))
        row, column = tiling.position(rest, (down, across))
        return row, column, owner, refs[2][owner], refs[3][owner]

    def load(at: Any, step: Any, refs: Any, buffers: Any, barrier: Any) -> None:
        row, column, _, first, _ = at
        inner = pl.ds((first + step) * tiling.k, tiling.k)
        plgpu.copy_gmem_to_smem(refs[0].at[inner, pl.ds(row * tiling.m, tiling.m)], buffers[0], barrier)
        plgpu.copy_gmem_to_smem(refs[1].at[inner, pl.ds(column * tiling.n, tiling.n)], buffers[1], barrier)

    def multiply(acc: Any, left: Any, right: Any, part: tuple[Any, Any]) -> None:
        m, n = part
        plgpu.wgmma(acc, left.at[:, m].transpose((1, 0)), right.at[:, n])

    def target(at: Any, out_ref: Any) -> Any:
        return out_ref.at[at[2], pl.ds(at[0] * tiling.m, tiling.m), pl.ds(at[1] * tiling.n, tiling.n)]

    kernel = _persistent(
        tiling,
        tiles=groups * down * across,
        shapes=((tiling.k, tiling.m), (tiling.k, tiling.n)),
        operand=x.dtype,
        result=jax.ShapeDtypeStruct((groups, x.shape[1], y.shape[1]), dtype),
        tile=tile,
        load=load,
        multiply=multiply,
        target=target,
        multiprocessors=multiprocessors,
        interpret=interpret,
        cost=_cost(x.shape[0], x.shape[1], y.shape[1], (x, y), dtype, groups * x.shape[1] * y.shape[1]),
        name="grouped_sums",
    )
    return kernel(x, y, first, steps)


def _persistent(
    tiling: Tiling,
    *,
    tiles: int,
    shapes: tuple[tuple[int, int], tuple[int, int]],
    operand: DTypeLike,
    result: jax.ShapeDtypeStruct,
    tile: Callable[[Any, Any], Any],
    load: Callable[..., None],
    multiply: Callable[..., None],
    target: Callable[[Any, Any], Any],
    multiprocessors: int,
    interpret: Any,
    cost: pl.CostEstimate,
    name: str,
) -> Callable[..., jax.Array]:
    """A kernel that computes the tiles of a result.

    Args:
        tiles: number of tiles of the result.
        shapes: shapes of the two operands' parts that a stage holds.
        tile: maps the index of a tile and the operands to its position, whose last entry is the number of steps.
        load: starts the copies of one step.
        multiply: adds the product of one stage to a warpgroup's sum.
        target: the part of the result that a tile fills.
        cost: the operations and bytes of one call.
    """
    m, n = tiling.warpgroup
    epilogue_m, epilogue_n = min(_EPILOGUE, m), min(_EPILOGUE, n)
    down, across = m // epilogue_m, n // epilogue_n
    slots = min(2, down * across)

    def body(*refs: Any) -> None:
        *operands, out_ref, left, right, out_buffer, full, empty = refs
        warpgroup = lax.axis_index("warpgroup")
        loop = functools.partial(plgpu.nd_loop, (tiles,), collective_axes="multiprocessor", init_carry=jnp.int32(0))

        @pl.when(warpgroup == 2)
        def _copy() -> None:
            plgpu.set_max_registers(40, action="decrease")

            @loop()
            def total(info: Any, carry: Any) -> Any:
                at = tile(info.index[0], operands)

                def step(index: Any, count: Any) -> Any:
                    stage = lax.rem(count, jnp.int32(tiling.stages))

                    @pl.when(count >= tiling.stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[stage])

                    load(at, index, operands, (left.at[stage], right.at[stage]), full.at[stage])
                    return count + 1

                return lax.fori_loop(jnp.int32(0), at[-1], step, carry)

            @pl.loop(jnp.maximum(total - tiling.stages, 0), total)
            def _drain(count: Any) -> None:
                plgpu.barrier_wait(empty.at[lax.rem(count, jnp.int32(tiling.stages))])

        @pl.when(warpgroup < 2)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            part = tiling.part(warpgroup)

            @loop()
            def _tiles(info: Any, carry: Any) -> Any:
                at = tile(info.index[0], operands)

                def sums(acc: Any) -> Any:
                    def step(index: Any, count: Any) -> Any:
                        stage = lax.rem(count, jnp.int32(tiling.stages))
                        plgpu.barrier_wait(full.at[stage])
                        multiply(acc, left.at[stage], right.at[stage], part)
                        plgpu.wgmma_wait(1)

                        @pl.when(index > 0)  # the previous product has finished
                        def _() -> None:
                            plgpu.barrier_arrive(empty.at[lax.rem(count - 1, jnp.int32(tiling.stages))])

                        return count + 1

                    count = lax.fori_loop(jnp.int32(0), at[-1], step, carry)
                    value = acc[...]

                    @pl.when(at[-1] > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(empty.at[lax.rem(count - 1, jnp.int32(tiling.stages))])

                    return value, count

                value, count = pl.run_scoped(sums, plgpu.ACC((m, n), jnp.float32))
                value = value.astype(out_ref.dtype)
                destination = target(at, out_ref).at[part]
                for number, (i, j) in enumerate(np.ndindex(down, across)):
                    block = (
                        slice(i * epilogue_m, (i + 1) * epilogue_m),
                        slice(j * epilogue_n, (j + 1) * epilogue_n),
                    )
                    buffer = out_buffer.at[warpgroup, number % slots]
                    plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
                    buffer[...] = value[block]
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(buffer, destination.at[block])
                return count

            plgpu.wait_smem_to_gmem(0)

    left, right = (
        plgpu.SMEM((tiling.stages, *shape), operand, transforms=_transforms(shape[1], operand)) for shape in shapes
    )
    out_buffer = plgpu.SMEM(
        (2, slots, epilogue_m, epilogue_n), result.dtype, transforms=_transforms(epilogue_n, result.dtype)
    )
    barrier = plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages)

    def with_buffers(*refs: Any) -> None:
        pl.run_scoped(
            functools.partial(body, *refs), left, right, out_buffer, barrier, barrier, collective_axes="warpgroup"
        )

    # `plgpu.kernel` takes no cost estimate.
    kernel = pl.kernel(
        with_buffers,
        out_type=result,
        mesh=plgpu.Mesh(
            grid=(multiprocessors,), grid_names=("multiprocessor",), num_threads=3, thread_name="warpgroup"
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        cost_estimate=cost,
        name=name,
    )
    batched: Callable[..., jax.Array] = jax.custom_batching.sequential_vmap(lambda *operands: kernel(*operands))
    return batched


def _cost(
    rows: int, inner: int, outer: int, operands: Sequence[jax.Array], dtype: DTypeLike, size: int
) -> pl.CostEstimate:
    """The cost of multiplying each row, with the padding of its group, by one matrix.

    Args:
        operands: the operands, each read once.
        size: number of elements of the result.
    """
    read = sum(operand.size * operand.dtype.itemsize for operand in operands)
    return pl.CostEstimate(
        flops=2 * rows * inner * outer,
        bytes_accessed=read + size * jnp.dtype(dtype).itemsize,
        transcendentals=0,
    )


def _transforms(columns: int, dtype: DTypeLike) -> tuple[Any, ...]:
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
