"""Expert parallelism: tokens are sent to the devices that hold their experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import axcore as ax
from axcore.module import ContextError, cond, remat
from axcore.nn import Blocks, GroupedMatmul
from axcore.parallel import Layout, active_layout, shard_map
from axcore.parallel.axes import group_of
from axcore_moe.dispatch import Dispatch, Dropless, by_expert
from axcore_moe.experts import Experts
from axcore_moe.ragged import ExpertShards, ragged_exchange
from axcore_moe.routing import Routing, RowAssignment


class Exchange(Dispatch):
    """All-to-all over the mesh axes that the rules map `expert` to (GShard, arXiv 2006.16668, section 3.2).

    Each device holds only its own experts. If the experts are also sharded over other mesh axes (such as `embed` over
    fsdp), they are gathered along those axes for the call. Tokens are sharded over all devices. If the rules do not
    shard `expert`, each device computes its own tokens with all experts, without an all-to-all.
    """

    layout_fields = ("transport",)
    matmul: GroupedMatmul = Blocks()
    factor: ax.PositiveFloat = 2.0
    """Capacity as a multiple of the fair share of (token, choice) pairs: of the pairs that a device receives, and with
    padding of those that it sends to each other device."""
    dropless: bool = True
    """True: if any device exceeds this capacity, the call runs with the largest capacity that can be needed, which
    multiplies the compute by up to the number of expert shards. Both variants are compiled, and the backward pass
    recomputes the exchange. False: pairs beyond the capacity are dropped and counted in `dropped`, which requires
    padding."""
    transport: Literal["auto", "ragged", "padded"] = "auto"
    """`ragged` sends only pairs (`jax.lax.ragged_all_to_all`, which CPUs lack); `padded` sends buffers of the capacity.
    `auto`: ragged on TPUs if dropless."""

    def __call__(self, experts: Experts, x: jax.Array, routing: Routing) -> tuple[jax.Array, jax.Array]:
        layout = active_layout()
        axes = layout.axes_of("expert") if layout is not None else ()
        if layout is not None and layout.manual.intersection(group_of(layout.rules.get("expert"))):
            raise ContextError("dispatch=Exchange runs inside a shard_map over the mesh axes of the experts")
        if layout is None or layout.size_of((*axes, *_token_axes(layout))) == 1:
            return Dropless(matmul=self.matmul)(experts, x, routing)
        num_shards = layout.size_of(axes)
        if routing.choices is None and num_shards == 1:
            return Dropless(matmul=self.matmul)(experts, x, routing)
        if routing.choices is None:
            raise ax.ConfigError(
                "dispatch=Exchange requires a router that gives every token the same number of experts, such as TopK. "
                "With this router use dispatch=Dropless()."
            )
        tokens, num_experts = x.shape[0], routing.num_experts
        padding = -tokens % layout.num_shards

        def padded(values: jax.Array, fill: float) -> jax.Array:
            by_choice = values.reshape(routing.choices, tokens)
            return jnp.pad(by_choice, ((0, 0), (0, padding)), constant_values=fill)

        all_axes = _all_axes(layout)
        rows, choices = PartitionSpec(all_axes, None), PartitionSpec(None, all_axes)
        y, lost = shard_map(
            functools.partial(
                self._local,
                axes=axes,
                all_axes=all_axes,
                num_experts=num_experts,
                num_shards=num_shards,
                ragged=self._is_ragged(layout.platform),
            ),
            in_specs=(rows, choices, choices),
            out_specs=(rows, PartitionSpec()),
            gather=[axis for axis in all_axes if axis not in axes],
        )(experts, jnp.pad(x, ((0, padding), (0, 0))), padded(routing.expert, num_experts), padded(routing.weight, 0))
        return y[:tokens], lost / routing.expert.size

    def _is_ragged(self, platform: str) -> bool:
        if self.transport == "ragged":
            where = 'dispatch=Exchange with transport="ragged"'
            if not self.dropless:
                raise ax.ConfigError(f'{where} drops nothing, so dropless=False requires transport="padded"')
            if platform == "cpu":
                raise ax.ConfigError(f'{where} requires a GPU or TPU, got a CPU. Set transport="auto"')
        return self.transport == "ragged" or (self.transport == "auto" and self.dropless and platform == "tpu")

    def _local(
        self,
        experts: Experts,
        x: jax.Array,
        expert: jax.Array,
        weight: jax.Array,
        *,
        axes: tuple[str, ...],
        all_axes: tuple[str, ...],
        num_experts: int,
        num_shards: int,
        ragged: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs on each device, inside `shard_map`.

        Args:
            x: [tokens, input_dim], the tokens of this device.
            expert: int32 [choices, tokens]; `num_experts` for padding.
            weight: float32 [choices, tokens].
            axes: mesh axes that the experts are sharded over, into `num_shards` shards.
            all_axes: all axes of this `shard_map`.
            ragged: whether pairs are sent without padding.

        Returns:
            [tokens, input_dim], the weighted sum over each token's experts; and the number of dropped pairs on all
            devices, a float32 scalar.
        """
        choices, tokens = expert.shape
        lost = jnp.zeros((), jnp.float32)
        if num_shards == 1:
            y = by_expert(experts, x, expert.reshape(-1), num_experts, self.matmul, weight.reshape(-1))
            return y.reshape(choices, tokens, -1).sum(axis=0), lost
        num_local_experts = num_experts // num_shards
        max_capacity = tokens * min(choices, num_local_experts)
        capacity = min(max_capacity, math.ceil(self.factor * choices * tokens / num_shards))
        target = expert.reshape(-1) // num_local_experts
        needed = jnp.zeros((num_shards,), jnp.int32).at[target].add(1, mode="drop")  # padding is out of range
        transport = ragged_exchange if ragged else _padded_exchange
        shards = ExpertShards(axes, num_shards, num_local_experts, self.matmul)

        def with_capacity(capacity: int) -> Callable[..., Any]:
            return functools.partial(transport, shards=shards, capacity=capacity)

        if self.dropless and capacity < max_capacity:
            largest = jax.lax.psum(needed, axes) / num_shards if ragged else needed
            fits = jax.lax.pmax(largest.max(), all_axes) <= capacity  # all devices must take the same branch
            run = cond(fits, remat(with_capacity(capacity)), remat(with_capacity(max_capacity)))
        else:
            run = with_capacity(capacity)
        if not self.dropless:
            lost = jax.lax.psum(jnp.maximum(needed - capacity, 0).sum().astype(jnp.float32), all_axes)
        y = run(experts, x, expert.reshape(-1)).reshape(choices, tokens, -1)
        return (y * weight[..., None].astype(y.dtype)).sum(axis=0), lost


def _padded_exchange(
    experts: Experts, x: jax.Array, expert: jax.Array, *, shards: ExpertShards, capacity: int
) -> jax.Array:
    """See `ragged_exchange`. Each device sends `capacity` rows to each shard, some of them empty."""
    axes, num_shards, num_local_experts, matmul = shards
    assignment = RowAssignment.of(
        expert // num_local_experts, jnp.arange(num_shards) * capacity, num_shards * capacity, capacity
    )
    # The index among the experts of the receiver; `num_local_experts` for an empty row.
    local_expert = jnp.append(expert % num_local_experts, num_local_experts)[assignment.pair].astype(jnp.int32)
    all_to_all = functools.partial(jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
    arrived = by_expert(experts, all_to_all(assignment.permute(x)), all_to_all(local_expert), num_local_experts, matmul)
    return assignment.unpermute(all_to_all(arrived))


def _all_axes(layout: Layout) -> tuple[str, ...]:
    """Every automatic mesh axis, those of `batch` and `seq` first, so that tokens stay on their device."""
    return tuple(dict.fromkeys((*_token_axes(layout), *layout.automatic)))


def _token_axes(layout: Layout) -> tuple[str, ...]:
    return (*layout.axes_of("batch"), *layout.axes_of("seq"))
