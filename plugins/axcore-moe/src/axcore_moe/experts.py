"""The experts of one layer, with their matrices stacked in one array."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import axcore as ax
from axcore.module import remat
from axcore.nn import FeedForward, Grouped, GroupedLinear, GroupedMatmul, GroupedRequest, Linear, combined, grouped_each
from axcore.parallel import constrain
from axcore_moe.routing import RowAssignment


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

    def requests(self) -> tuple[GroupedRequest, ...]:
        """The grouped products of `grouped`."""
        return tuple(
            GroupedRequest.of(
                linear.dtypes.compute, linear.config.input_dim, linear.config.output_dim, plain=linear.plain
            )
            for linear in (self.gate, self.up, self.down)
            if linear is not None
        )

    @ax.method
    def grouped(
        self,
        x: jax.Array,
        assignment: RowAssignment,
        expert: jax.Array,
        sizes: jax.Array,
        matmul: GroupedMatmul,
        weight: jax.Array | None = None,
    ) -> jax.Array:
        """Applies the expert of each row to that row.

        The backward pass permutes x again, since its rows take more memory than x and the hidden features together.

        Args:
            x: [tokens, input_dim].
            assignment: the row of each pair of a token and an expert. Rows are sorted by expert.
            expert: int32 [blocks], in ascending order: the expert of each block of `rows / blocks` rows.
            sizes: int32 [experts], number of rows of each expert.
            matmul: computes the grouped products.
            weight: float32 [pairs], a factor of each pair's output; None: 1.

        Returns:
            [rows, input_dim].
        """
        groups = Grouped(sizes, expert, assignment.pair.size, matmul)

        def into(self: Experts, x: jax.Array, assignment: RowAssignment, groups: Grouped) -> list[jax.Array]:
            linears = [linear for linear in (self.gate, self.up) if linear is not None]
            return grouped_each(linears, assignment.permute(x), groups)

        *gate, up = remat(into)(self, x, assignment, groups)
        scale = None if weight is None else assignment.permute(weight[:, None])[:, 0]
        return self.down.grouped(self._hidden(gate[0] if gate else None, up), groups, scale)

    @ax.method
    def batched(self, x: jax.Array) -> jax.Array:
        """Applies each expert to the same number of rows: [expert, rows, input_dim] -> the same shape."""
        gate = None if self.gate is None else self.gate.batched(x)
        return self.down.batched(self._hidden(gate, self.up.batched(x)))

    def _hidden(self, gate: jax.Array | None, up: jax.Array) -> jax.Array:
        gate = None if gate is None else checkpoint_name(gate, "gate")
        hidden = combined(self.config.block, gate, checkpoint_name(up, "up"))
        rows = PartitionSpec.UNCONSTRAINED  # the dispatch decides how rows are sharded
        return constrain(hidden, *("expert",)[: hidden.ndim - 2], rows, "mlp")
