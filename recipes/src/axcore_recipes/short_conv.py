"""A transformer layer that starts with a short causal convolution over tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import axcore as ax
from axcore.nn import DecodingState, Initializer, KVCache, TokenInfo, TransformerLayer, Zeros

Hidden = Float[Array, "batch seq input_dim"]


class ShortConv(ax.Layer):
    """`y_t = x_t + sum_k weight_k x_{t - k}`, per feature and within a document.

    The layer is initialized to the identity. To copy the continuation of an earlier occurrence, attention requires
    tokens that contain information about their predecessors. The convolution provides it directly (Allen-Zhu 2025,
    Physics of Language Models 4.1, "Canon layers").
    """

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        width: ax.PositiveInt = 4
        """Number of mixed tokens, including the current one."""
        init: Initializer = Zeros()
        batch_size: ax.PositiveInt | None = None
        """Number of rows whose last tokens are kept between calls while decoding; None: no state."""

        def for_decoding(self, batch_size: int, max_len: int, cache: KVCache.Config) -> ShortConv.Config:
            return self.set(batch_size=batch_size)

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        self.weight = self.param("weight", (cfg.width, cfg.input_dim), cfg.init, rngs, axes=(None, "embed"))
        self.past = nnx.data(None)
        if cfg.batch_size is not None:
            shape = (cfg.batch_size, cfg.width - 1, cfg.input_dim)
            self.past = DecodingState(jnp.zeros(shape, self.dtypes.compute), axes=("batch", None, "embed"))

    def __call__(self, x: Hidden, tokens: TokenInfo) -> Hidden:
        """Adds the weighted previous tokens to each token."""
        return tokens.join([self._convolved(*block) for block in zip(tokens.split(x), tokens.blocks, strict=True)])

    def _convolved(self, x: Hidden, tokens: TokenInfo) -> Hidden:
        (batch, seq, dim), reach = x.shape, self.config.width - 1
        if self.past is None:
            past = jnp.zeros((batch, reach, dim), x.dtype)
        else:
            past = tokens.rows.take(self.past).astype(x.dtype)
        row = jnp.concatenate([past, x], axis=1)
        y = x
        for lag, weight in enumerate(self.weight[...].astype(x.dtype)):
            before = row[:, reach - lag : reach - lag + seq]
            same = (tokens.positions >= lag)[..., None]  # whether the token `lag` places back is in the same document
            y = y + jnp.where(same, before, 0) * weight
        if self.past is not None:
            tokens.rows.put(self.past, _last(row, reach, tokens.valid))
        return y


class ConvTransformerLayer(TransformerLayer):
    """A transformer layer that first applies a short convolution to the residual stream."""

    class Config(TransformerLayer.Config):
        conv: ShortConv.Config = ShortConv.Config()

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.conv = self.child("conv", cfg.conv, rngs, input_dim=cfg.input_dim)

    def __call__(self, x: Hidden, tokens: TokenInfo) -> Hidden:
        """Convolution, attention and feed-forward block."""
        return super().__call__(self.conv(x, tokens), tokens)


def _last(row: Hidden, reach: int, valid: jax.Array | None) -> Hidden:
    """The last `reach` valid tokens of each row. The first `reach` tokens of `row` are those of the previous call."""
    seq = row.shape[1] - reach
    if valid is None:
        return row[:, seq:]
    count = jnp.max(jnp.where(valid, jnp.arange(1, seq + 1), 0), axis=1)
    count = jnp.broadcast_to(count, row.shape[:1])
    return jax.vmap(lambda tokens, start: jax.lax.dynamic_slice_in_dim(tokens, start, reach))(row, count)
