"""Token embedding."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from axcore.config import REQUIRED, FiniteFloat, PositiveInt
from axcore.module import Rngs, method
from axcore.nn.initializers import Initializer, Normal
from axcore.nn.matmul import Transposed
from axcore.nn.weighted import Weighted
from axcore.numerics import gather
from axcore.parallel import is_sharded


class Embedding(Weighted):
    """A vector for each token id.

    The slot `numerics` is empty unless a feature fills it. It represents the table, looks up the vectors of ids and
    computes the products of `attend`.
    """

    class Config(Weighted.Config):
        vocab_size: PositiveInt = REQUIRED
        output_dim: PositiveInt = REQUIRED
        init: Initializer = Normal()
        scale: FiniteFloat | None = None
        """Multiplies the vectors, but not the products of `attend` (Gemma: sqrt(output_dim)); None: 1."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: Rngs):
        shape = (cfg.vocab_size, cfg.output_dim)
        self.make_weight(shape, cfg.init, rngs, axes=("vocab", "embed"), input_axis=-1)

    def __call__(self, ids: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        """The vectors of the ids, in the compute dtype. The gradient of the table is summed in float32."""
        if ids.size == 1 and is_sharded():
            # XLA takes a single vector as a slice, for which each device would get a copy of the whole table.
            x = self._vectors(jnp.broadcast_to(ids, (2, *ids.shape[1:])))[:1]
        else:
            x = self._vectors(ids)
        return x if self.config.scale is None else x * jnp.asarray(self.config.scale, x.dtype)

    def _vectors(self, ids: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        if self.numerics is None:
            return gather(self.float_weight, ids, self.dtypes.compute or jnp.float32)
        return self.numerics.gather(ids, self.representation)

    @method
    def attend(self, x: Float[Array, "*shape embed"]) -> Float[Array, "*shape vocab"]:
        """The product of `x` with the vector of every token id, for a tied output head."""
        return self.multiply(x, Transposed())
