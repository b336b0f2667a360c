"""The Pallas kernel, lowered by Triton: one row times a matrix that is read once, at the memory bandwidth."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped

_MAGIC = 0x4B000000
"""The bits of 2**23 in float32. Its last byte counts ones, so a byte in its place makes 2**23 + byte."""
_LOAD = 16
"""Bytes that a thread loads at once."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the kernel divides its work.

    Attributes:
        warps: warps of a program, a power of two. A program computes one output at a time.
        programs: number of programs. It should fill the GPU once, since each program reads the row again.
    """

    warps: int
    programs: int


@functools.partial(jax.jit, static_argnames=("dtype", "tiling", "interpret"))  # traced once for all layers of a model
def product(
    x: Float[Array, " input_dim"],
    weight: Shaped[Array, "output_dim input_dim"],
    scales: Float32[Array, " output_dim"] | None = None,
    *,
    dtype: DTypeLike,
    tiling: Tiling,
    interpret: bool = False,
) -> Float[Array, " output_dim"]:
    """`(weight @ x) * scales` with float32 sums, rounded to a dtype at the end.

    Args:
        weight: its elements are converted to the dtype of x after loading, such as int8 codes. `input_dim` elements
            have a multiple of 4 bytes.
        scales: factors of the outputs; None: 1.
    """
    rounding = x.dtype if x.dtype.itemsize < weight.dtype.itemsize else None
    x = x if rounding is None else x.astype(jnp.float32)
    words = _words(weight)
    row = _row(x, words.shape[1])
    operands = [row, words]
    operands += [jnp.full(1, _MAGIC, jnp.int32)] if weight.dtype == jnp.int8 else []
    operands += [] if scales is None else [scales]
    kernel = pl.pallas_call(
        functools.partial(
            _kernel,
            types=(x.dtype, weight.dtype, rounding),
            has_scales=scales is not None,
            tiling=tiling,
            interpret=interpret,
        ),
        grid=(tiling.programs,),
        in_specs=[pl.no_block_spec] * len(operands),
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct(weight.shape[:1], dtype),
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=1),
        interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=2 * weight.size,
            bytes_accessed=weight.nbytes + x.nbytes + weight.shape[0] * jnp.dtype(dtype).itemsize,
            transcendentals=0,
        ),
        name="gemv",
    )
    return kernel(*operands)


def _words(x: Shaped[Array, "*shape length"]) -> Int32[Array, "*shape words"]:
    """The same memory as integers of 4 bytes."""
    each = 4 // x.dtype.itemsize
    return lax.bitcast_convert_type(x if each == 1 else x.reshape(*x.shape[:-1], -1, each), jnp.int32)


def _row(x: Shaped[Array, " input_dim"], words: int) -> Int32[Array, "each words"]:
    """x as words: in column i those of the elements that word i of a column of the matrix multiplies.

    XLA computes the bit operations in the kernel that makes x, but would transpose words in a kernel of its own.
    """
    each = 4 // x.dtype.itemsize
    if x.size == words * each:
        return _words(x)[None]
    bits = lax.bitcast_convert_type(x, f"uint{32 // each}").astype(jnp.uint32).reshape(words, -1, each)
    made = functools.reduce(jnp.bitwise_or, [bits[..., at] << (32 // each * at) for at in range(each)])
    return lax.bitcast_convert_type(made.T, jnp.int32)


def _kernel(
    x_ref: Any, weight_ref: Any, *refs: Any, types: Any, has_scales: bool, tiling: Tiling, interpret: bool
) -> None:
    """A program computes every `programs`-th output. It keeps x in registers, and loads the weights of the next output
    before it computes the current one.

    Elements are loaded as words, so that the words of x and of the matrix have the same layout in registers: other
    layouts cost a copy through shared memory, and a barrier, for each load.
    """
    *others, out_ref = refs
    x_type, weight_type, rounding = types
    magic = others[0][0] if weight_type == jnp.int8 else None
    outputs, depth = weight_ref.shape
    size = tiling.warps * 32 * _LOAD // 4
    places = [start + jnp.arange(size) for start in range(0, depth, size)]
    lives = [None if start + size <= depth else start + jnp.arange(size) < depth for start in range(0, depth, size)]

    def weights(output: Any) -> tuple[Any, ...]:
        exists = jnp.broadcast_to(output < outputs, size)
        masks = [exists if live is None else exists & live for live in lives]
        return tuple(
            triton.load(weight_ref.at[output, place], mask=mask, other=jnp.int32(0), eviction_policy="evict_first")
            for place, mask in zip(places, masks, strict=True)
        )

    first = pl.program_id(0)
    loaded = weights(first)
    x = []
    for place, live in zip(places, lives, strict=True):
        other = None if live is None else jnp.int32(0)
        rows = [triton.load(x_ref.at[row, place], mask=live, other=other) for row in range(x_ref.shape[0])]
        x.append([each for row in rows for each in _floats(row, x_type, None, interpret)])

    def step(number: Any, loaded: tuple[Any, ...]) -> tuple[Any, ...]:
        output = first + number * tiling.programs
        following = weights(output + tiling.programs)
        total = jnp.zeros(size, jnp.float32)
        for words, xs in zip(loaded, x, strict=True):
            for each, factor in zip(_floats(words, weight_type, magic, interpret), xs, strict=True):
                each = each if rounding is None else each.astype(rounding).astype(jnp.float32)
                total = _multiply_add(each, factor, total, interpret)
        y = total.sum()
        if has_scales:
            y = y * others[-1][output]
        out_ref[output] = y.astype(out_ref.dtype)
        return following

    lax.fori_loop(0, pl.cdiv(outputs - first, tiling.programs), step, loaded)


def _floats(words: Any, dtype: Any, magic: Any, interpret: bool) -> Sequence[Any]:
    """The elements of words in float32: all of the first, all of the second, ..."""
    if dtype == jnp.int8:
        biased = words ^ jnp.int32(-0x7F7F7F80)  # code + 128 in each byte
        bits = [_byte(biased, number, magic, interpret) for number in range(4)]
        return [_as_float(each) - jnp.float32(2**23 + 128) for each in bits]  # conversions have a fraction of the rate
    if dtype == jnp.float32:
        return [_as_float(words)]
    if dtype == jnp.bfloat16:
        return [_as_float(words << 16), _as_float(words & jnp.int32(-0x10000))]
    bits = 8 * jnp.dtype(dtype).itemsize
    parts = [lax.shift_right_logical(words, jnp.int32(at)).astype(f"int{bits}") for at in range(0, 32, bits)]
    return [lax.bitcast_convert_type(each, dtype).astype(jnp.float32) for each in parts]


def _as_float(bits: Any) -> Any:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _byte(words: Any, number: int, magic: Any, interpret: bool) -> Any:
    """`_MAGIC` with a byte of the words in the place of its last byte.

    One instruction, if `magic` is not known to the compiler: otherwise, it copies the selector for each use.
    """
    if interpret:
        return (lax.shift_right_logical(words, jnp.int32(8 * number)) & 0xFF) | magic
    return _assembly(f"prmt.b32 $0, $1, $2, {0x7440 + number:#x};", "=r,r,r", jnp.int32, words, magic)


def _multiply_add(x: Any, y: Any, total: Any, interpret: bool) -> Any:
    """`x * y + total`, which Pallas does not contract to one instruction."""
    if interpret:
        return x * y + total
    return _assembly("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", jnp.float32, x, y, total)


def _assembly(text: str, constraints: str, dtype: DTypeLike, *operands: Any) -> Any:
    """An instruction for each element."""
    shape = operands[0].shape
    (found,) = triton.elementwise_inline_asm(
        text,
        args=[jnp.broadcast_to(each, shape) for each in operands],
        constraints=constraints,
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, dtype)],
    )
    return found
