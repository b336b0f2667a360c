"""The experts of one layer, with their matrices stacked in one array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import axcore as ax
from axcore.nn import FeedForward, Grouped, GroupedLinear, GroupedMatmul, Linear, combined
from axcore.parallel import constrain


class Experts(ax.Layer):
    """`num_experts` feed-forward blocks with the same config, made of `GroupedLinear` maps [expert, input, output].

    Slots of the block's linear maps, such as `block.up.adapter`, apply to all experts. The values `gate` and `up` are
    tagged for remat policies.
    """

    class Config(ax.Layer.Config):
        input_dim: ax.PositiveInt = ax.REQUIRED
        num_experts: ax.PositiveInt = ax.REQUIRED
        block: FeedForward.Config = FeedForward.Config()
        """Config of each expert."""

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        block = cfg.block
        if block.hidden_dim is ax.REQUIRED:
            raise ax.ConfigError("block.hidden_dim is REQUIRED. Set it to the hidden features of each expert.")
        into, out_of = (cfg.input_dim, block.hidden_dim), (block.hidden_dim, cfg.input_dim)
        self.gate = self._maps("gate", block.gate, into, ("expert", "embed", "mlp"), rngs)
        self.up = self._maps("up", block.up, into, ("expert", "embed", "mlp"), rngs)
        self.down = self._maps("down", block.down, out_of, ("expert", "mlp", "embed"), rngs)

    def _maps(
        self, name: str, linear: Linear.Config | None, widths: tuple[int, int], axes: tuple[str, ...], rngs: ax.Rngs
    ) -> Any:
        cfg = None if linear is None else GroupedLinear.Config.of(linear)
        sizes = {"groups": self.config.num_experts, "input_dim": widths[0], "output_dim": widths[1]}
        return self.child(name, cfg, rngs, axes=axes, **sizes)

    @ax.method
    def grouped(self, x: jax.Array, expert: jax.Array, sizes: jax.Array, matmul: GroupedMatmul) -> jax.Array:
        """Applies the expert of each row to that row.

        Args:
            x: [rows, input_dim], sorted by expert.
            expert: int32 [blocks], in ascending order: the expert of each block of `rows / blocks` rows.
            sizes: int32 [experts], number of rows of each expert.
            matmul: computes the grouped products.

        Returns:
            [rows, input_dim].
        """
        groups = Grouped(sizes, expert, x.shape[0], matmul)
        return self._block(x, lambda linear, x: linear.grouped(x, groups))

    @ax.method
    def batched(self, x: jax.Array) -> jax.Array:
        """Applies each expert to the same number of rows: [expert, rows, input_dim] -> the same shape."""
        return self._block(x, lambda linear, x: linear.batched(x))

    def _block(self, x: jax.Array, mapped: Callable[[GroupedLinear, jax.Array], jax.Array]) -> jax.Array:
        gate = None if self.gate is None else checkpoint_name(mapped(self.gate, x), "gate")
        up = checkpoint_name(mapped(self.up, x), "up")
        hidden = combined(self.config.block, gate, up)
        rows = PartitionSpec.UNCONSTRAINED  # the dispatch decides how rows are sharded
        hidden = constrain(hidden, *("expert",)[: hidden.ndim - 2], rows, "mlp")
        return mapped(self.down, hidden)
