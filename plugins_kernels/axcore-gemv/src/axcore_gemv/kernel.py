"""The Pallas kernel, lowered by Triton: one row times a matrix that is read once, at the memory bandwidth."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Float32, Shaped


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the kernel divides its work.

    Attributes:
        outputs: outputs of a program, a power of two.
        inputs: inputs of a load, a power of two.
        loads: number of loads that are in flight at the same time.
        warps: warps of a program, a power of two.
    """

    outputs: int
    inputs: int
    loads: int
    warps: int


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # traced once for all layers of a model
def product(
    x: Float[Array, " input_dim"],
    weight: Shaped[Array, "output_dim input_dim"],
    *,
    tiling: Tiling,
    interpret: bool = False,
) -> Float32[Array, " output_dim"]:
    """`weight @ x`, with float32 sums.

    Args:
        weight: its elements are converted to the dtype of x after loading, such as int8 codes.
    """
    outputs, depth = weight.shape
    kernel = pl.pallas_call(
        functools.partial(_kernel, tiling=tiling),
        grid=(pl.cdiv(outputs, tiling.outputs),),
        in_specs=[pl.no_block_spec, pl.no_block_spec],
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((outputs,), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=1),
        interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=2 * depth * outputs,
            bytes_accessed=weight.size * weight.dtype.itemsize + x.size * x.dtype.itemsize + 4 * outputs,
            transcendentals=0,
        ),
        name="gemv",
    )
    return kernel(x, weight)


def _kernel(x_ref: Any, weight_ref: Any, out_ref: Any, *, tiling: Tiling) -> None:
    outputs, depth = weight_ref.shape
    first = pl.program_id(0) * tiling.outputs
    across = pl.ds(first, tiling.outputs)
    inside = None if outputs % tiling.outputs == 0 else first + jnp.arange(tiling.outputs) < outputs
    chunk = tiling.inputs * tiling.loads

    def step(number: Any, total: Any) -> Any:
        tiles = []
        for load in range(tiling.loads):  # all loads before their use, so that they run at the same time
            start = number * chunk + load * tiling.inputs
            down = pl.ds(start, tiling.inputs)
            live = None if depth % chunk == 0 else start + jnp.arange(tiling.inputs) < depth
            w = triton.load(
                weight_ref.at[across, down],
                mask=_both(inside, live, (tiling.outputs, tiling.inputs)),
                other=None if live is None and inside is None else jnp.zeros((), weight_ref.dtype),
                eviction_policy="evict_first",
            )
            other = None if live is None else jnp.zeros((), x_ref.dtype)
            tiles.append((triton.load(x_ref.at[down], mask=live, other=other), w))
        for x, w in tiles:
            total = total + x.astype(jnp.float32)[None] * _wide(w, x.dtype)
        return total

    total = jnp.zeros((tiling.outputs, tiling.inputs), jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(depth, chunk), step, total)
    triton.store(out_ref.at[across], total.sum(axis=1), mask=inside)


def _wide(w: Any, dtype: Any) -> Any:
    """The elements of a tile, rounded to a dtype, in float32."""
    if w.dtype != jnp.int8:
        return w.astype(dtype).astype(jnp.float32)
    # 2**23 + 128 + code, made of bits: the conversion instruction has a fraction of the rate of an addition.
    bits = w.astype(jnp.int32) + jnp.int32(0x4B000080)
    return lax.bitcast_convert_type(bits, jnp.float32) - jnp.float32(2**23 + 128)


def _both(inside: Any, live: Any, shape: tuple[int, int]) -> Any:
    """The mask of a tile [outputs, inputs], from those of its outputs and of its inputs; None: all elements exist."""
    masks = [None if inside is None else inside[:, None], None if live is None else live[None]]
    found = [jnp.broadcast_to(mask, shape) for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, found) if found else None
