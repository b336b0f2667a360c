"""INT8 numerics for training and inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import axcore as ax
from axcore.numerics import CalibrationState, Product, Weight
from axcore_int8.product import Options, WeightGradient, int8_product
from axcore_int8.rounding import quantized, scale_of
from axcore_int8.straight_through import StraightThrough


class Int8(StraightThrough):
    """Products of int8 codes with int32 sums: vector-wise quantization (Dettmers et al. 2022, arXiv 2208.07339, 2.1).

    The weight has one scale per output, and x one per row. All scales are computed in each call, from the largest
    absolute value. The gradient of x is computed in int8, too, and by default the gradient of the weight in the compute
    dtype, as in SwitchBack (Wortsman et al. 2023, arXiv 2304.13013, section 2.2.1).

    For inference, the weight is stored as `codes` (int8) and `scales` (float32).
    """

    class Config(StraightThrough.Config):
        activation_scales: Literal["dynamic", "static"] | None = "dynamic"
        """Scales of x: one per row, computed in each call; one per layer, measured by `axcore.numerics.calibrated`; or
        None for products of float activations and a rounded weight (weight-only quantization)."""
        percentile: Annotated[float, ax.Range(above=0, at_most=100)] = 100.0
        """Static scales: the percentile of the absolute values of x that becomes 127, the maximum over batches."""
        weight_gradient: WeightGradient = "float"
        """Computes the gradient of the weight in the compute dtype, or in int8."""
        rounding: Literal["nearest", "stochastic"] = "nearest"
        """Rounding of the operands of the backward pass while training. Stochastic rounding draws from the PRNG stream
        `rounding`."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        super().__init__(cfg, rngs=rngs)
        if cfg.activation_scales is None:
            for name, default in (("rounding", "nearest"), ("weight_gradient", "float")):
                if (value := getattr(cfg, name)) != default:
                    raise ax.ConfigError(
                        f"{name}={value!r} has no effect with activation_scales=None, since gradients are computed in "
                        f"floats; remove {name}, or set activation_scales to 'dynamic'"
                    )
        if cfg.activation_scales == "static":
            self.input_amax = CalibrationState(jnp.full((), jnp.nan), axes=())
        elif cfg.percentile != 100:
            raise ax.ConfigError(
                f"percentile={cfg.percentile} has no effect with activation_scales={cfg.activation_scales!r}; remove "
                f"it, or set activation_scales to 'static'"
            )

    def encode(self, weight: Float[Array, "*shape"]) -> dict[str, jax.Array]:
        codes, scales = quantized(weight, self.config.input_axis)
        return {"codes": codes, "scales": scales}

    def decode(self, stored: Mapping[str, jax.Array]) -> Float[Array, "*shape"]:
        return stored["codes"] * stored["scales"]

    def observe(self, x: Float[Array, "*rows input_dim"]) -> None:
        largest = jnp.percentile(jnp.abs(x).astype(jnp.float32), self.config.percentile)
        self.input_amax[...] = jnp.maximum(self.input_amax[...], largest)

    def __call__(
        self, x: Float[Array, "*rows input_dim"], weight: Weight, product: Product
    ) -> Float[Array, "*rows output_dim"]:
        cfg, dtype = self.config, self.dtypes.accumulate or x.dtype
        trained = None if isinstance(weight, Mapping) else weight
        if cfg.activation_scales is None and trained is not None:
            return super().__call__(x, trained, product)
        form = weight if isinstance(weight, Mapping) else self.encode(jax.lax.stop_gradient(weight))
        codes, scales = form["codes"], form["scales"].squeeze(cfg.input_axis)
        if cfg.activation_scales is None:
            return product.scaled(x, codes, scales, dtype)
        input_scale = scale_of(self.input_amax[...]) if cfg.activation_scales == "static" else None
        key = self.rng("rounding") if cfg.rounding == "stochastic" and self.training else None
        options = Options(dtype, cfg.input_axis, cfg.weight_gradient, self.frame.path)
        return int8_product(options, x, trained, codes, scales, input_scale, product, key)
