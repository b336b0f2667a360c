"""The Pallas kernel, lowered by Triton: a few rows times a matrix that is read once, at the memory bandwidth.

A program multiplies all rows by a tile of the matrix. The programs of a column of tiles, `splits` of them, divide the
inputs between them and write partial sums, which XLA adds up in the operation that follows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Shaped

DOT_ROWS = 16
"""Rows of the smallest tile that tensor cores multiply."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the kernel divides its work.

    Attributes:
        columns: columns of a tile, a power of two.
        inputs: inputs of a tile, a power of two.
        loads: number of tiles that are loaded at once; with tensor cores, the number of pipeline stages.
        splits: number of programs that divide the inputs of the same columns.
        warps: warps of a program, a power of two.
        tensor_cores: whether tensor cores multiply, which more than one row require.
    """

    columns: int
    inputs: int
    loads: int
    splits: int
    warps: int
    tensor_cores: bool

    @property
    def chunk(self) -> int:
        """The inputs of one step of the loop over inputs."""
        return self.inputs if self.tensor_cores else self.inputs * self.loads


def partial_products(
    x: Float[Array, "rows input_dim"],
    weight: Shaped[Array, "input_dim output_dim"],
    *,
    tiling: Tiling,
    interpret: bool = False,
) -> Float[Array, "splits rows output_dim"]:
    """Partial sums, in float32, of `x @ weight`. They add up to the product.

    Without tensor cores, each thread keeps several loads of 16 bytes in flight, in registers. Tensor cores multiply
    tiles of 16 rows that are copied to shared memory ahead of their use.

    Args:
        weight: its elements are converted to the dtype of x after loading, such as int8 codes.
    """
    rows, depth = x.shape
    columns = weight.shape[1]
    steps = pl.cdiv(depth, tiling.chunk)
    per_split = pl.cdiv(steps, tiling.splits)
    one = not tiling.tensor_cores
    x = x[0] if one else jnp.pad(x, ((0, DOT_ROWS - rows), (0, 0)))
    shape = (tiling.splits, columns) if one else (tiling.splits, rows, columns)
    kernel = pl.pallas_call(
        functools.partial(_one_row if one else _few_rows, tiling=tiling, steps=steps, per_split=per_split),
        grid=(pl.cdiv(columns, tiling.columns), tiling.splits),
        in_specs=[pl.no_block_spec, pl.no_block_spec],
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.loads),
        interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * depth * columns,
            bytes_accessed=weight.size * weight.dtype.itemsize + x.size * x.dtype.itemsize,
            transcendentals=0,
        ),
        name="gemv",
    )
    return kernel(x, weight).reshape(tiling.splits, rows, columns)


def _one_row(x_ref: Any, weight_ref: Any, out_ref: Any, *, tiling: Tiling, steps: int, per_split: int) -> None:
    depth, columns = weight_ref.shape
    column, split = pl.program_id(0), pl.program_id(1)
    across = pl.ds(column * tiling.columns, tiling.columns)
    inside = _inside(column, columns, tiling.columns)
    is_whole = depth % (tiling.inputs * tiling.loads) == 0

    def step(number: Any, total: Any) -> Any:
        tiles = []
        for load in range(tiling.loads):  # all loads before their use, so that they run at the same time
            down, live = _rows_of(number * tiling.loads + load, None if is_whole else depth, tiling.inputs)
            w = triton.load(
                weight_ref.at[down, across],
                mask=_both(live, inside, (tiling.inputs, tiling.columns)),
                other=_zero(weight_ref, live, inside),
                eviction_policy="evict_first",
            )
            tiles.append((triton.load(x_ref.at[down], mask=live, other=_zero(x_ref, live, None)), w))
        for x, w in tiles:
            total = total + x.astype(jnp.float32)[:, None] * _wide(w, x.dtype)
        return total

    first = split * per_split
    total = lax.fori_loop(
        first,
        jnp.minimum(first + per_split, steps),
        step,
        jnp.zeros((tiling.inputs, tiling.columns), jnp.float32),
    )
    triton.store(out_ref.at[split, across], total.sum(axis=0), mask=inside)


def _wide(w: Any, dtype: Any) -> Any:
    """The elements of a tile, rounded to a dtype, in float32."""
    if w.dtype != jnp.int8:
        return w.astype(dtype).astype(jnp.float32)
    # 2**23 + 128 + code, made of bits: the conversion instruction has a sixteenth of the rate of an addition.
    bits = w.astype(jnp.int32) + jnp.int32(0x4B000080)
    return lax.bitcast_convert_type(bits, jnp.float32) - jnp.float32(2**23 + 128)


def _few_rows(x_ref: Any, weight_ref: Any, out_ref: Any, *, tiling: Tiling, steps: int, per_split: int) -> None:
    depth, columns = weight_ref.shape
    rows = out_ref.shape[1]
    column, split = pl.program_id(0), pl.program_id(1)
    across = pl.ds(column * tiling.columns, tiling.columns)
    inside = _inside(column, columns, tiling.columns)

    def step(number: Any, total: Any) -> Any:
        down, live = _rows_of(number, None if depth % tiling.inputs == 0 else depth, tiling.inputs)
        w = triton.load(
            weight_ref.at[down, across],
            mask=_both(live, inside, (tiling.inputs, tiling.columns)),
            other=_zero(weight_ref, live, inside),
        )
        x = triton.load(
            x_ref.at[:, down],
            mask=None if live is None else jnp.broadcast_to(live[None], (DOT_ROWS, tiling.inputs)),
            other=_zero(x_ref, live, None),
        )
        return total + lax.dot(x, w.astype(x.dtype), precision=_precision(x), preferred_element_type=jnp.float32)

    first = split * per_split
    total = lax.fori_loop(
        first,
        jnp.minimum(first + per_split, steps),
        step,
        jnp.zeros((DOT_ROWS, tiling.columns), jnp.float32),
    )
    real = jnp.arange(DOT_ROWS)[:, None] < rows
    mask = jnp.broadcast_to(real if inside is None else real & inside[None], total.shape)
    triton.store(out_ref.at[split, pl.ds(0, DOT_ROWS), across], total, mask=mask)


def _precision(x: Any) -> lax.Precision:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def _inside(column: Any, columns: int, tile: int) -> Any:
    """Which columns of a tile exist; None: all of every tile."""
    return None if columns % tile == 0 else column * tile + jnp.arange(tile) < columns


def _rows_of(number: Any, depth: int | None, tile: int) -> tuple[Any, Any]:
    """The inputs of a tile, and which of them exist, if there are `depth`; None: all of every tile."""
    return pl.ds(number * tile, tile), None if depth is None else number * tile + jnp.arange(tile) < depth


def _both(live: Any, inside: Any, shape: tuple[int, int]) -> Any:
    masks = [None if live is None else live[:, None], None if inside is None else inside[None]]
    found = [jnp.broadcast_to(mask, shape) for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, found) if found else None


def _zero(ref: Any, live: Any, inside: Any) -> Any:
    return None if live is None and inside is None else jnp.zeros((), ref.dtype)


def default_tiling(
    rows: int, depth: int, columns: int, itemsize: int, multiprocessors: int, tensor_cores: bool | None = None
) -> Tiling:
    """A tiling that gives each multiprocessor an almost equal number of bytes, in few partial sums.

    Args:
        itemsize: bytes of an element of the matrix.
        tensor_cores: whether tensor cores multiply one row, too; None: they do not.
    """
    tensor_cores = rows > 1 or bool(tensor_cores)
    width = 128 // itemsize if itemsize < 4 else 32  # 128 bytes of each row of the matrix
    inputs, loads, warps = (128, 4, 4) if tensor_cores else (32, 8, 8)
    chunk = inputs if tensor_cores else inputs * loads
    tiles, steps = math.ceil(columns / width), math.ceil(depth / chunk)

    def cost(splits: int) -> float:
        programs = tiles * splits
        longest = math.ceil(programs / multiprocessors) * math.ceil(steps / splits)
        idle = 0.1 * max(0.0, 1 - programs / (4 * multiprocessors))  # few programs do not hide the memory's latency
        return longest * multiprocessors / (tiles * steps) + idle + 0.01 * splits

    splits = min(range(1, min(8, steps) + 1), key=cost)
    return Tiling(width, inputs, loads, splits, warps, tensor_cores)
