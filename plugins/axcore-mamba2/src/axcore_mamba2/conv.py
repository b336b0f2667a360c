"""A short causal convolution per channel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

import axcore as ax
from axcore.nn import DecodingState, FanIn, Initializer, KVCache, Zeros
from axcore_mamba2.documents import Documents


class CausalConv(ax.Layer):
    """`y_t = sum_k weight_k x_{t - width + 1 + k} + bias`, per channel and within a document.

    Positions before a document count as zeros. The sum is in float32.
    """

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        width: ax.PositiveInt = ax.REQUIRED
        init: Initializer = FanIn(scale=1 / 3)
        """The variance of the published code, whose initial weights are uniform within +-1 / sqrt(width)."""
        use_bias: bool = True
        axes: tuple[str | None, str | None] | None = None
        """Logical axes of the weight, [width, input_dim]. None uses the parent's, or replicates."""
        batch_size: ax.PositiveInt | None = None
        """Number of rows that are decoded together. Their last inputs are kept for the next call. None keeps none."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> CausalConv.Config:
            return self.set(batch_size=batch_size)

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        axes = cfg.axes or (None, None)
        self.weight = self.param("weight", (cfg.width, cfg.input_dim), cfg.init, rngs, axes=axes)
        self.bias = nnx.data(None)
        if cfg.use_bias:
            self.bias = self.param("bias", (cfg.input_dim,), Zeros(), rngs, axes=axes[1:])
        self.past = nnx.data(None)
        if cfg.batch_size is not None:
            shape = (cfg.batch_size, cfg.width - 1, cfg.input_dim)
            self.past = DecodingState(jnp.zeros(shape, self.dtypes.compute), axes=("batch", None, axes[1]))

    def __call__(self, x: jax.Array, documents: Documents) -> jax.Array:
        """[batch, seq, input_dim] -> the same shape, in the compute dtype."""
        (batch, seq, dim), reach = x.shape, self.config.width - 1
        x = documents.only_tokens(x)
        past = jnp.zeros((batch, reach, dim), x.dtype) if self.past is None else documents.rows.take(self.past)
        row = jnp.concatenate([past.astype(x.dtype), x], axis=1)
        y = jnp.zeros(x.shape, jnp.float32)
        for k, weight in enumerate(self.weight[...].astype(jnp.float32)):
            y += documents.where_same(reach - k, row[:, k : k + seq] * weight)
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)
        if self.past is not None:
            documents.rows.put(self.past, documents.ending(past, x))
        return y.astype(self.dtypes.compute)
