"""FP8 products with gradients, and the scales of their operands."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from axcore.numerics import Product
from axcore_fp8.products import backward, forward
from axcore_fp8.quantize import E4M3, E5M2, Quantized, amax_of, overflows, quantize, quantize_blocks, scale_of

Scaling = Literal["current", "delayed", "block"]

TAGS = ("fp8_input", "fp8_weight")
"""Tags of the quantized input and weight, for remat policies such as `ByTag(save=("fp8_input",))`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Histories:
    """The state of delayed scaling. The gradient of each array is its next value.

    Attributes:
        input, weight, gradient: the largest absolute values of this operand in earlier steps, the latest first; 0 where
            there was none, or where it was not finite.
        gradient_overflow: 1 if the gradient of the last step was out of range, otherwise 0.
    """

    input: Float[Array, " length"]
    weight: Float[Array, " length"]
    gradient: Float[Array, " length"]
    gradient_overflow: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Form:
    """What is static in a product.

    Attributes:
        scaling: how scales are chosen.
        x, weight, y: dtypes of the input, of the float weight and of the result.
    """

    scaling: Scaling
    x: np.dtype[np.generic]
    weight: np.dtype[np.generic]
    y: np.dtype[np.generic]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_product(
    form: Form,
    x: Float[Array, "*rows input_dim"],
    weight: Float[Array, "*shape"],
    histories: Histories | None,
    product: Product,
) -> tuple[Float[Array, "*rows output_dim"], Float[Array, ""]]:
    """Multiplies E4M3 numbers forward. Both gradients are products with E5M2 numbers, or E4M3 with block scaling.

    Args:
        histories: required by delayed scaling.

    Returns:
        (the product in `form.y`, the number of operands that are out of range or not finite, from 0 to 2).
    """
    return _forward(form, x, weight, histories, product)[0]


def _forward(
    form: Form, x: jax.Array, weight: jax.Array, histories: Histories | None, product: Product
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    of_input, of_weights, of_gradient = (
        (None, None, None) if histories is None else (histories.input, histories.weight, histories.gradient)
    )
    of_x, new_input, x_overflows = _quantized(form, x, E4M3, of_input, 1)
    of_weight, new_weight, weight_overflows = _quantized(form, weight, E4M3, of_weights, 2)
    of_x, of_weight = (_tagged(each, tag) for each, tag in zip((of_x, of_weight), TAGS, strict=True))
    y = forward(product, of_x, of_weight, form.y, form.x)
    overflow = x_overflows.astype(jnp.float32) + weight_overflows.astype(jnp.float32)
    return (y, overflow), (of_x, of_weight, (new_input, new_weight, of_gradient), product)


def _backward(form: Form, kept: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    x, weight, (new_input, new_weight, old), product = kept
    dtype = E4M3 if form.scaling == "block" else E5M2
    y_bar, new, overflow = _quantized(form, cotangents[0], dtype, old, 1)
    x_bar, weight_bar = backward(product, x, weight, y_bar, (form.x, form.weight, form.y))
    histories = None if new is None else Histories(new_input, new_weight, new, overflow.astype(jnp.float32))
    return x_bar, weight_bar, histories, None


fp8_product.defvjp(_forward, _backward)


def _tagged(x: Quantized, tag: str) -> Quantized:
    """The array, with a tag for remat policies.

    The tag is on the bits of the codes. `jax.checkpoint` rounds the numbers that it saves to the exponent range of an
    IEEE dtype, and E4M3 uses the largest exponent, from 256 to 448, which would become NaN.
    """
    bits = checkpoint_name(jax.lax.bitcast_convert_type(x.codes, jnp.uint8), tag)
    return Quantized(jax.lax.bitcast_convert_type(bits, x.codes.dtype), checkpoint_name(x.scale, tag))


def _quantized(
    form: Form, x: jax.Array, dtype: DTypeLike, history: jax.Array | None, block_dims: int
) -> tuple[Quantized, jax.Array | None, jax.Array]:
    """(the codes, the next history, whether numbers are out of range)."""
    if form.scaling == "block":
        made = quantize_blocks(x, dtype, block_dims)
        return made, None, ~jnp.isfinite(made.scale).all()
    amax = amax_of(x)
    if history is None:
        scale = scale_of(amax, dtype)
        return quantize(x, dtype, scale), None, overflows(amax, scale, dtype)
    scale = scale_of(history.max(), dtype)
    is_finite = jnp.isfinite(amax)
    made = quantize(x, dtype, scale)
    if block_dims == 1:  # not a weight, which XLA rounds and transposes in one kernel
        # The barrier makes one kernel round x and find its amax. Otherwise XLA finds it at the end of the step.
        made = dataclasses.replace(made, codes=jax.lax.optimization_barrier(made.codes))
    made = dataclasses.replace(made, scale=jnp.where(is_finite, scale, jnp.nan))  # infinities saturate
    new = jnp.roll(history, 1).at[0].set(jnp.where(is_finite, amax, 0.0))
    return made, new, overflows(amax, scale, dtype)
