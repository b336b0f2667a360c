"""A linear map of the last dimension."""

from __future__ import annotations

import jax
from flax import nnx

from axcore.config import REQUIRED, at_least
from axcore.module import Layer, Rngs
from axcore.nn.initializers import FanIn, Initializer, Zeros
from axcore.nn.matmul import matmul


class Linear(Layer):
    """`x @ weight + bias`: [..., input_dim] -> [..., output_dim].

    Slots, empty unless a feature fills them; both are offered `input_dim`, `output_dim` and `axes`:

    - `quantizer`: `(x, weight) -> y`, computes the product in numbers of its own;
    - `adapter`: `(x, y, weight) -> y`, corrects the product, as LoRA does, before the bias is added.
    """

    class Config(Layer.Config):
        input_dim: int = REQUIRED
        output_dim: int = REQUIRED
        use_bias: bool = False
        init: Initializer = FanIn()
        bias_init: Initializer = Zeros()
        axes: tuple[str | None, str | None] | None = None
        """Logical axes of the weight; None: the parent's, or replicated."""
        quantizer: Layer.Config | None = None
        adapter: Layer.Config | None = None

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "input_dim", "output_dim")
        axes = cfg.axes or (None, None)
        self.weight = self.param("weight", (cfg.input_dim, cfg.output_dim), cfg.init, rngs, axes=axes)
        self.bias = nnx.data(None)
        if cfg.use_bias:
            self.bias = self.param("bias", (cfg.output_dim,), cfg.bias_init, rngs, axes=axes[1:])
        widths = {"input_dim": cfg.input_dim, "output_dim": cfg.output_dim, "axes": axes}
        self.quantizer = self.child("quantizer", cfg.quantizer, rngs, **widths)
        self.adapter = self.child("adapter", cfg.adapter, rngs, **widths)

    def __call__(self, x: jax.Array) -> jax.Array:
        types = self.dtypes
        x, weight = x.astype(types.compute), self.weight[...]
        y = matmul(x, weight, types.accumulate) if self.quantizer is None else self.quantizer(x, weight)
        if self.adapter is not None:
            y = self.adapter(x, y, weight)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        return y.astype(types.output or types.compute)
