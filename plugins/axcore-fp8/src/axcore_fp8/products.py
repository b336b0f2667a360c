"""Products of FP8 codes: the three products of a linear map.

Products of one matrix and batched products multiply the codes themselves, which XLA turns into FP8 instructions. The
other kinds (grouped products of kernels, and block scaling) multiply the dequantized numbers. The results are equal up
to the rounding of sums.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axcore.nn import Batched, Blocks, Grouped, Plain, Transposed
from axcore.numerics import Product
from axcore_fp8.quantize import Quantized


def forward(product: Product, x: Quantized, weight: Quantized, dtype: DTypeLike, compute: DTypeLike) -> jax.Array:
    """The product, in `dtype`.

    Args:
        compute: dtype of dequantized numbers.
    """
    if not _has_fp8_products(product, x, weight):
        return product(x.dequantized(compute), weight.dequantized(compute), dtype)
    scale = x.scale * weight.scale
    match product:
        case Grouped():
            blocks, matrices = _of_blocks(product, x.codes), weight.codes[product.group]
            y = _dot(blocks, matrices, (2, 1), dtype, scale, batch=True)
            return y.reshape(x.codes.shape[0], -1)
        case Batched():
            return _dot(x.codes, weight.codes, (2, 1), dtype, scale, batch=True)
        case _:
            last = x.codes.ndim - 1
            return _dot(x.codes, weight.codes, (last, int(type(product) is Transposed)), dtype, scale)


def backward(
    product: Product,
    x: Quantized,
    weight: Quantized,
    y_bar: Quantized,
    dtypes: tuple[DTypeLike, DTypeLike, DTypeLike],
) -> tuple[jax.Array, jax.Array]:
    """The gradients of x and of the weight, which is rounded to the dtype of x first, as without FP8.

    Args:
        dtypes: the dtypes of x (and its gradient), of the weight (and its gradient), and of the product.
    """
    of_x, of_weight, of_y = dtypes
    if not _has_fp8_products(product, x, weight):
        call = jax.vjp(lambda x, weight: product(x, weight, of_y), x.dequantized(of_x), weight.dequantized(of_weight))
        x_bar, weight_bar = call[1](y_bar.dequantized(of_y))
        return x_bar, weight_bar
    scale_x, scale_weight = y_bar.scale * weight.scale, x.scale * y_bar.scale
    match product:
        case Grouped():
            g, matrices = _of_blocks(product, y_bar.codes), weight.codes[product.group]
            x_bar = _dot(g, matrices, (2, 2), of_x, scale_x, batch=True, exact=True).reshape(x.codes.shape)
            each = _dot(_of_blocks(product, x.codes), g, (1, 1), jnp.float32, scale_weight, batch=True, exact=True)
            total = jnp.zeros(weight.codes.shape, jnp.float32).at[product.group].add(each, indices_are_sorted=True)
            return x_bar, total.astype(of_weight)
        case Batched():
            return (
                _dot(y_bar.codes, weight.codes, (2, 2), of_x, scale_x, batch=True, exact=True),
                _dot(x.codes, y_bar.codes, (1, 1), of_x, scale_weight, batch=True, exact=True).astype(of_weight),
            )
        case _:
            is_transposed = type(product) is Transposed
            last, rows = x.codes.ndim - 1, tuple(range(x.codes.ndim - 1))
            pair = (y_bar.codes, x.codes) if is_transposed else (x.codes, y_bar.codes)
            return (
                _dot(y_bar.codes, weight.codes, (last, 0 if is_transposed else 1), of_x, scale_x, exact=True),
                _dot(*pair, (rows, rows), of_x, scale_weight, exact=True).astype(of_weight),
            )


def _has_fp8_products(product: Product, x: Quantized, weight: Quantized) -> bool:
    if x.scale.ndim or weight.scale.ndim:
        return False
    if isinstance(product, Grouped):
        return isinstance(product.matmul, Blocks)
    return type(product) in (Plain, Transposed, Batched)


def _of_blocks(product: Grouped, rows: jax.Array) -> jax.Array:
    return rows.reshape(product.group.size, -1, rows.shape[1])


def _dot(
    x: jax.Array,
    y: jax.Array,
    over: tuple[int | tuple[int, ...], int | tuple[int, ...]],
    dtype: DTypeLike,
    scale: jax.Array,
    *,
    batch: bool = False,
    exact: bool = False,
) -> jax.Array:
    """The product of codes, summed over these dimensions, times the scale. XLA folds the scale into the product.

    Args:
        batch: whether the first dimension of both arrays is a batch dimension.
        exact: whether sums are exact in float32; otherwise tensor cores may round them to 14 bits.
    """
    of_x, of_y = (axes if isinstance(axes, tuple) else (axes,) for axes in over)
    dimensions = ((of_x, of_y), ((0,), (0,)) if batch else ((), ()))
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    # Sums of codes can exceed the largest float16, 65504, which their products with the scale do not.
    sums = jnp.float32 if jnp.dtype(dtype) == jnp.float16 else jnp.dtype(dtype)
    y = jax.lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=sums)
    return (y * scale.astype(sums)).astype(dtype)
