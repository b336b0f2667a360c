"""A linear map of the last dimension."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from axcore.config import REQUIRED, at_least
from axcore.module import Layer, Rngs, method
from axcore.nn.initializers import FanIn, Initializer, Zeros
from axcore.nn.matmul import Plain
from axcore.nn.weighted import Weighted


class Linear(Weighted):
    """`x @ weight + bias`: [..., input_dim] -> [..., output_dim].

    Slots, empty unless a feature fills them:

    - `numerics`: how the weight is represented and multiplied;
    - `adapter`: `(x, y, weight, product) -> y`, corrects the product, as LoRA does, before the bias is added. It is
      offered `input_dim`, `output_dim`, `groups` (None) and `axes`. The weight is that which the product used, in
      floats; `product` multiplies x with another matrix, see `axcore.numerics.Product`.
    """

    class Config(Weighted.Config):
        input_dim: int = REQUIRED
        output_dim: int = REQUIRED
        use_bias: bool = False
        init: Initializer = FanIn()
        bias_init: Initializer = Zeros()
        axes: tuple[str | None, str | None] | None = None
        """Logical axes of the weight; None: the parent's, or replicated."""
        adapter: Layer.Config | None = None

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "input_dim", "output_dim")
        axes = cfg.axes or (None, None)
        self.make_weight((cfg.input_dim, cfg.output_dim), cfg.init, rngs, axes=axes)
        self.bias = nnx.data(None)
        if cfg.use_bias:
            self.bias = self.param("bias", (cfg.output_dim,), cfg.bias_init, rngs, axes=axes[1:])
        widths = {"input_dim": cfg.input_dim, "output_dim": cfg.output_dim, "axes": axes}
        self.adapter = self.child("adapter", cfg.adapter, rngs, **widths)

    def __call__(self, x: jax.Array) -> jax.Array:
        types = self.dtypes
        x, product = x.astype(types.compute), Plain()
        y = self.multiply(x, product)
        if self.adapter is not None:
            y = self.adapter(x, y, self.base_matrix, product)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        return y.astype(types.output or types.compute)

    @method
    def matrix(self) -> jax.Array:
        """The matrix [input_dim, output_dim] that the layer multiplies with, numerics and adapter included."""
        weight = self.base_matrix
        if self.adapter is None:
            return weight
        return self.adapter(jnp.eye(self.config.input_dim, dtype=self.dtypes.compute), weight, weight, Plain())
