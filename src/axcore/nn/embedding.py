"""Token embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, at_least
from axcore.module import Layer, Rngs, method
from axcore.nn.initializers import Initializer, Normal
from axcore.nn.matmul import matmul


class Embedding(Layer):
    """A vector for each token id."""

    class Config(Layer.Config):
        vocab_size: int = REQUIRED
        output_dim: int = REQUIRED
        init: Initializer = Normal()
        scale: float | None = None
        """Multiplies the vectors, but not the products of `attend` (Gemma: sqrt(output_dim)); None leaves them."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        at_least(cfg, 1, "vocab_size", "output_dim")
        self.weight = self.param("weight", (cfg.vocab_size, cfg.output_dim), cfg.init, rngs, axes=("vocab", "embed"))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """int [batch, seq] -> [batch, seq, output_dim] in the compute dtype."""
        x = self.weight[...].astype(self.dtypes.compute)[ids]
        return x if self.config.scale is None else x * jnp.asarray(self.config.scale, x.dtype)

    @method
    def attend(self, x: jax.Array) -> jax.Array:
        """[..., output_dim] -> [..., vocab_size]: the product with every embedding, for tied output heads."""
        return matmul(x, self.weight[...].T)
