"""The product of activations and an int8 weight, with a backward pass in int8."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, PRNGKeyArray

from axcore import ConfigError
from axcore.numerics import Product
from axcore_int8.rounding import MAX_TERMS, quantized, rounded, scale_of

WeightGradient = Literal["float", "int8"]


class Options(NamedTuple):
    """Constants of `int8_product`."""

    dtype: DTypeLike
    """The dtype of the result."""
    input_axis: int
    """The axis of the weight that products sum over."""
    weight_gradient: WeightGradient
    path: str
    """Path of the layer, for error messages."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def int8_product(
    options: Options,
    x: Float[Array, "*rows input_dim"],
    weight: Float[Array, "*shape"] | None,
    codes: Int8[Array, "*shape"],
    scales: Float[Array, "*group output_dim"],
    input_scale: Float[Array, ""] | None,
    product: Product,
    key: PRNGKeyArray | None,
) -> Float[Array, "*rows output_dim"]:
    """`product(x, codes * scales)`, computed from int8 codes of x with int32 sums.

    The gradient of x is an int8 product too: the cotangent is multiplied by the scales of the weight, which belong to
    the dimension that this product sums over, and rounded with one scale per row. The gradient of the weight is that
    of `codes * scales`, computed from the unrounded x and cotangent, or likewise in int8, with one scale per output.

    Args:
        weight: receives the gradient of `codes * scales`. None: they get no gradient.
        codes: the rounded weight.
        scales: one for each output, without the input axis.
        input_scale: the scale of x. None: computed for each row.
        key: rounds the operands of the backward pass stochastically. None: to nearest.
    """
    return _forward(options, x, weight, codes, scales, input_scale, product, key)[0]


def _forward(
    options: Options,
    x: jax.Array,
    weight: jax.Array | None,
    codes: jax.Array,
    scales: jax.Array,
    input_scale: jax.Array | None,
    product: Product,
    key: jax.Array | None,
) -> tuple[jax.Array, Any]:
    _check_terms(options, codes.shape[options.input_axis], "inputs")
    if input_scale is None:
        x_codes, x_scales = quantized(x, -1)
    else:
        x_codes = rounded(x.astype(jnp.float32) / input_scale)
        # Codes would hide infinities and NaN.
        x_scales = jnp.where(jnp.isfinite(x).all(-1, keepdims=True), input_scale, jnp.nan)
    y = product(x_codes, codes, jnp.int32).astype(jnp.float32) * (x_scales * product.broadcast(scales))
    kept = x if options.weight_gradient == "float" else (x_codes, x_scales)
    forms = jnp.zeros((), x.dtype), weight if weight is None else jnp.zeros((), weight.dtype)
    return y.astype(options.dtype), (forms, None if weight is None else kept, codes, scales, product, key)


def _backward(options: Options, residuals: Any, y_bar: jax.Array) -> tuple[Any, ...]:
    (x_form, weight_form), kept, codes, scales, product, key = residuals
    _check_terms(options, y_bar.shape[-1], "outputs")
    keys = (None, None) if key is None else jax.random.split(key)
    wide = y_bar.astype(jnp.float32)
    y_codes, y_scales = quantized(wide * product.broadcast(scales), -1, keys[0])
    x_bar = product.input_gradient(y_codes, codes, jnp.int32).astype(jnp.float32) * y_scales
    weight_bar = None
    if weight_form is not None:
        weight_bar = _weight_gradient(options, kept, wide, product, keys[1]).astype(weight_form.dtype)
    return x_bar.astype(x_form.dtype), weight_bar, None, None, None, None, None


def _weight_gradient(
    options: Options, kept: Any, y_bar: jax.Array, product: Product, key: jax.Array | None
) -> jax.Array:
    if options.weight_gradient == "float":
        return product.weight_gradient(kept, y_bar.astype(kept.dtype), jnp.float32)
    x_codes, x_scales = kept
    _check_terms(options, y_bar.size // y_bar.shape[-1], "rows")
    y_bar = y_bar * x_scales
    scales = scale_of(product.largest(jnp.abs(y_bar)))
    y_codes = rounded(y_bar / product.broadcast(scales), key)
    sums = product.weight_gradient(x_codes, y_codes, jnp.int32)
    return sums.astype(jnp.float32) * jnp.expand_dims(scales, options.input_axis)


int8_product.defvjp(_forward, _backward)


def _check_terms(options: Options, count: int, what: str) -> None:
    if count > MAX_TERMS:
        remedy = {
            "inputs": "Exclude the layer with where=",
            "outputs": "Exclude the layer with where=",
            "rows": "Increase microbatches, or set weight_gradient='float'",
        }
        raise ConfigError(
            f"{options.path}: an int8 product over {count} {what} could overflow int32, which holds the sum of "
            f"{MAX_TERMS} terms. {remedy[what]}"
        )
