"""The numerics `fp8`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import axcore as ax
from axcore.module import GradientState, Reduce
from axcore.numerics import Numerics, Product, Weight
from axcore_fp8.hardware import check_hardware
from axcore_fp8.quantize import E4M3, scale_of
from axcore_fp8.training import Form, Histories, Scaling, fp8_product

HISTORY_LEN = 1024


class Fp8(Numerics):
    """Matrix products of 8-bit floating-point numbers (Micikevicius et al. 2022, arXiv 2209.05433).

    In training, the weight is a float parameter. The product and both of its gradients round their operands: inputs and
    weights to E4M3, gradients to E5M2. Scales are powers of two.

    With `stored=True`, the weight is stored as E4M3 `codes`, with one float32 scale per output, and inputs are rounded
    with one scale per row, whatever `scaling` is.

    Reports the summary `overflow`: the number of operands with numbers that are out of range, which saturate, or not
    finite, whose products are NaN. With delayed scaling, `gradient_overflow` is the same for the gradient, one step
    later. Remat policies can keep the tags `fp8_input` and `fp8_weight`.
    """

    class Config(Numerics.Config):
        scaling: Scaling = "current"
        """`current`: one scale per operand, from its largest value. `delayed`: one scale per operand, from its largest
        values in earlier steps; a new history gives a scale of 1, so the first steps are less precise. `block`: one
        scale per 128 inputs of a row, and per 128 x 128 elements of the weight, with E4M3 for gradients too
        (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). XLA has no such product, so it multiplies dequantized numbers:
        `block` shows the effect on training, without the speed."""
        amax_history_len: ax.PositiveInt | None = None
        """Number of steps in a history of delayed scaling; None: 1024."""
        weight_only: bool = False
        """Whether only the weight is rounded, with one scale per output. It requires no FP8 hardware. While training,
        gradients treat the rounding as the identity."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        super().__init__(cfg, rngs=rngs)
        if cfg.amax_history_len is not None and cfg.scaling != "delayed":
            raise ax.ConfigError(
                f"amax_history_len={cfg.amax_history_len} has no effect with scaling={cfg.scaling!r}; remove it, "
                f"or set scaling='delayed'"
            )
        if cfg.weight_only and cfg.scaling != "current":
            raise ax.ConfigError(
                f"scaling={cfg.scaling!r} has no effect with weight_only=True, which has one scale per output; "
                f"remove one of them"
            )
        self.has_histories = cfg.scaling == "delayed" and not cfg.stored
        if self.has_histories:
            zeros = jnp.zeros((cfg.amax_history_len or HISTORY_LEN,), jnp.float32)
            self.input = GradientState(zeros, axes=(None,))
            self.weight = GradientState(zeros, axes=(None,))
            self.gradient = GradientState(zeros, axes=(None,))
            self.gradient_overflow = GradientState(jnp.zeros((), jnp.float32), axes=())

    def encode(self, weight: jax.Array) -> dict[str, jax.Array]:
        codes, scales = rounded(weight, self.config.input_axis)
        return {"codes": codes, "scales": scales}

    def decode(self, stored: Mapping[str, jax.Array]) -> jax.Array:
        return stored["codes"].astype(jnp.float32) * stored["scales"]

    def matrix(self, weight: Weight) -> jax.Array:
        """The rounded weight if it is stored or `weight_only` is set, otherwise the float weight."""
        if isinstance(weight, Mapping):
            return self.decode(weight)
        if not self.config.weight_only:
            return weight
        return weight + jax.lax.stop_gradient(self.decode(self.encode(weight)).astype(weight.dtype) - weight)

    def __call__(self, x: jax.Array, weight: Weight, product: Product) -> jax.Array:
        accumulate = self.dtypes.accumulate
        if isinstance(weight, Mapping):
            scales, dtype = weight["scales"].squeeze(self.config.input_axis), jnp.dtype(accumulate or x.dtype)
            if self.config.weight_only:
                return product.scaled(x, weight["codes"], scales, dtype)
            check_hardware(self.frame.path)
            return stored_product(dtype, x, weight["codes"], product.broadcast(scales), product)
        if self.config.weight_only:
            return product(x, self.matrix(weight), accumulate)
        check_hardware(self.frame.path)
        form = Form(self.config.scaling, x.dtype, weight.dtype, jnp.dtype(accumulate or x.dtype))
        y, overflow = fp8_product(form, x, weight, self._histories(), product)
        self.add_summary("overflow", overflow, Reduce.SUM)
        return y

    def _histories(self) -> Histories | None:
        if not self.has_histories:
            return None
        overflow = self.gradient_overflow[...]
        self.add_summary("gradient_overflow", overflow, Reduce.SUM)
        return Histories(self.input[...], self.weight[...], self.gradient[...], overflow)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def stored_product(
    dtype: np.dtype[np.generic], x: jax.Array, codes: jax.Array, scales: jax.Array, product: Product
) -> jax.Array:
    """The product of x, rounded with one scale per row, and stored codes. The gradient of x is a product of floats.

    Args:
        dtype: of the result.
        scales: of the codes, as `product.broadcast` reshapes them.
    """
    of_x, of_rows = rounded(x, -1)
    return (product(of_x, codes, jnp.float32) * of_rows * scales).astype(dtype)


def _stored_forward(
    dtype: np.dtype[np.generic], x: jax.Array, codes: jax.Array, scales: jax.Array, product: Product
) -> tuple[jax.Array, Any]:
    return stored_product(dtype, x, codes, scales, product), (jnp.zeros((), x.dtype), codes, scales, product)


def _stored_backward(dtype: np.dtype[np.generic], kept: Any, y_bar: jax.Array) -> tuple[Any, ...]:
    form, codes, scales, product = kept
    scaled = y_bar.astype(jnp.float32) * scales
    of_rows = scale_of(jnp.abs(scaled).max(-1, keepdims=True), E4M3)  # float16 would round small gradients to 0
    x_bar = product.input_gradient((scaled / of_rows).astype(form.dtype), codes.astype(form.dtype), jnp.float32)
    return (x_bar * of_rows).astype(form.dtype), None, None, None


stored_product.defvjp(_stored_forward, _stored_backward)


def rounded(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """(E4M3 codes in the shape of x, float32 scales per vector along the axis), with `x ~ codes * scales`."""
    wide = x.astype(jnp.float32)
    scales = scale_of(jnp.abs(wide).max(axis, keepdims=True), E4M3)
    return (wide / scales).astype(E4M3), scales
