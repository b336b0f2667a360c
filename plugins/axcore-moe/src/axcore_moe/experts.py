"""The experts of one layer, their weights stacked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import axcore as ax
from axcore.config import at_least
from axcore.nn import FeedForward, Linear, combined
from axcore.parallel import constrain
from axcore_moe.matmul import GroupedMatmul


class Experts(ax.Layer):
    """`num_experts` feed-forward blocks of one config. Their matrices are [expert, input, output].

    For remat policies the values `gate` and `up` are tagged.
    """

    class Config(ax.Layer.Config):
        input_dim: int = ax.REQUIRED
        num_experts: int = ax.REQUIRED
        block: FeedForward.Config = FeedForward.Config()
        """Each expert."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        block = cfg.block
        if block.hidden_dim is ax.REQUIRED:
            raise ax.ConfigError("block.hidden_dim is REQUIRED; set the hidden features of each expert")
        at_least(block, 1, "hidden_dim")
        wide, narrow = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
        into, out_of = (cfg.input_dim, block.hidden_dim), (block.hidden_dim, cfg.input_dim)
        self.gate, self.gate_bias = self._weights("gate", block.gate, into, wide, rngs)
        self.up, self.up_bias = self._weights("up", block.up, into, wide, rngs)
        self.down, self.down_bias = self._weights("down", block.down, out_of, narrow, rngs)

    def _weights(
        self, name: str, linear: Linear.Config | None, shape: tuple[int, int], axes: tuple[str, ...], rngs: ax.Rngs
    ) -> tuple[Any, Any]:
        """A matrix and a bias for each expert; None for those that it does not have."""
        if linear is None:
            return nnx.data(None), nnx.data(None)
        for slot in ("adapter", "quantizer"):
            if getattr(linear, slot) is not None:
                raise ax.ConfigError(
                    f"block.{name}.{slot}={getattr(linear, slot)!r}: the stacked weights of experts take none; attach "
                    f"it with where=... to other layers"
                )
        # Each expert starts as a block of its own would: the fan-in of an initializer is not that of all together.
        count = self.config.num_experts

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jax.vmap(lambda key: linear.init(key, shape[1:], dtype))(jax.random.split(key, count))

        matrix = self.param(name, (count, *shape), init, rngs, axes=axes)
        if not linear.use_bias:
            return matrix, nnx.data(None)
        bias = self.param(f"{name}_bias", (count, shape[1]), linear.bias_init, rngs, axes=(axes[0], axes[2]))
        return matrix, bias

    def grouped(self, x: jax.Array, expert: jax.Array, sizes: jax.Array, matmul: GroupedMatmul) -> jax.Array:
        """Each row by its expert.

        Args:
            x: [rows, input_dim], the rows of expert 0 first, then those of expert 1, and so on.
            expert: int32 [blocks], in ascending order: whose each block of as many rows is.
            sizes: int32 [experts], how many rows each has.

        Returns:
            [rows, input_dim].
        """

        def product(x: jax.Array, matrix: Any, bias: Any) -> jax.Array:
            y = matmul(x, matrix[...].astype(x.dtype), sizes, expert)
            if bias is None:
                return y
            of_block = bias[...].astype(y.dtype)[expert]
            return (y.reshape(expert.size, -1, y.shape[1]) + of_block[:, None]).reshape(y.shape)

        return self._block(x, product)

    def batched(self, x: jax.Array) -> jax.Array:
        """As many rows for each expert: [expert, rows, input_dim] -> the same shape."""

        def product(x: jax.Array, matrix: Any, bias: Any) -> jax.Array:
            y = jnp.einsum("eni,eio->eno", x, matrix[...].astype(x.dtype))
            return y if bias is None else y + bias[...].astype(y.dtype)[:, None]

        return self._block(x, product)

    def _block(self, x: jax.Array, product: Any) -> jax.Array:
        x = x.astype(self.dtypes.compute)
        gate = None if self.gate is None else checkpoint_name(product(x, self.gate, self.gate_bias), "gate")
        up = checkpoint_name(product(x, self.up, self.up_bias), "up")
        hidden = combined(self.config.block, gate, up)
        rows = PartitionSpec.UNCONSTRAINED  # which tokens are where is the dispatch's to say
        hidden = constrain(hidden, *("expert",)[: hidden.ndim - 2], rows, "mlp")
        return product(hidden, self.down, self.down_bias)
