"""A linear map of the last dimension."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from axcore.config import REQUIRED, PositiveInt
from axcore.module import Layer, Rngs, method
from axcore.nn.initializers import FanIn, Initializer, Zeros
from axcore.nn.matmul import Matmul, Plain
from axcore.nn.weighted import Weighted


class Linear(Weighted):
    """`x @ weight + bias`: [..., input_dim] -> [..., output_dim].

    Slots, empty unless a feature fills them:

    - `numerics`: represents the weight and multiplies by it;
    - `adapter`: `(x, y, weight, product) -> y`, changes the product y before the bias is added, as LoRA does. It
      receives `input_dim`, `output_dim` and `axes`. `weight` is the float weight that y was computed with;
      `product(x, matrix)` multiplies x by another matrix (see `axcore.numerics.Product`).
    """

    class Config(Weighted.Config):
        input_dim: PositiveInt = REQUIRED
        output_dim: PositiveInt = REQUIRED
        use_bias: bool = False
        init: Initializer = FanIn()
        bias_init: Initializer = Zeros()
        axes: tuple[str | None, str | None] | None = None
        """Logical axes of the weight; None: the parent's, or replicated."""
        adapter: Layer.Config | None = None
        matmul: Matmul = Matmul()
        """Computes the product, in the number format of `numerics`. Groups of a `GroupedLinear` do not use it."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        axes = cfg.axes or (None, None)
        self.make_weight((cfg.input_dim, cfg.output_dim), cfg.init, rngs, axes=axes)
        self.bias = nnx.data(None)
        if cfg.use_bias:
            self.bias = self.param("bias", (cfg.output_dim,), cfg.bias_init, rngs, axes=axes[1:])
        widths = {"input_dim": cfg.input_dim, "output_dim": cfg.output_dim, "axes": axes}
        self.adapter = self.child("adapter", cfg.adapter, rngs, **widths, groups=None)

    def __call__(self, x: Float[Array, "*shape input_dim"]) -> Float[Array, "*shape output_dim"]:
        """The result, in the output dtype."""
        types = self.dtypes
        x, matmul = x.astype(types.compute), self.config.matmul
        y = self.multiply(x, Plain(matmul, self.config.axes or (None, None)))
        if self.adapter is not None:
            y = self.adapter(x, y, self.base_matrix, Plain(matmul))
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        return y.astype(types.output or types.compute)

    @method
    def matrix(self) -> Float[Array, "input_dim output_dim"]:
        """The effective matrix, including numerics and adapter."""
        weight = self.base_matrix
        if self.adapter is None:
            return weight
        return self.adapter(jnp.eye(self.config.input_dim, dtype=self.dtypes.compute), weight, weight, Plain())
