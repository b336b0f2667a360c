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
from axcore_moe.ragged import exchanged
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
        count = layout.size_of(axes)
        if routing.choices is None and count == 1:
            return Dropless(matmul=self.matmul)(experts, x, routing)
        if routing.choices is None:
            raise ax.ConfigError(
                "dispatch=Exchange requires a router that gives every token the same number of experts, such as TopK. "
                "With this router use dispatch=Dropless()."
            )
        tokens, num_experts = x.shape[0], routing.num_experts
        missing = -tokens % layout.num_shards

        def padded(values: jax.Array, fill: float) -> jax.Array:
            by_choice = values.reshape(routing.choices, tokens)
            return jnp.pad(by_choice, ((0, 0), (0, missing)), constant_values=fill)

        over = _all_axes(layout)
        rows, choices = PartitionSpec(over, None), PartitionSpec(None, over)
        y, lost = shard_map(
            functools.partial(
                self._local,
                axes=axes,
                over=over,
                num_experts=num_experts,
                count=count,
                ragged=self._is_ragged(layout.platform),
            ),
            in_specs=(rows, choices, choices),
            out_specs=(rows, PartitionSpec()),
            gather=[axis for axis in over if axis not in axes],
        )(experts, jnp.pad(x, ((0, missing), (0, 0))), padded(routing.expert, num_experts), padded(routing.weight, 0))
        return y[:tokens], lost / routing.expert.size

    def _is_ragged(self, platform: str) -> bool:
        if self.transport == "ragged":
            where = 'dispatch=Exchange with transport="ragged"'
            if not self.dropless:
                raise ax.ConfigError(f'{where} drops nothing, so dropless=False requires transport="padded"')
            if platform == "cpu":
                raise ax.ConfigError(f'{where} requires a GPU or TPU, and this is a CPU. Set transport="auto"')
        return self.transport == "ragged" or (self.transport == "auto" and self.dropless and platform == "tpu")

    def _local(
        self,
        experts: Experts,
        x: jax.Array,
        expert: jax.Array,
        weight: jax.Array,
        *,
        axes: tuple[str, ...],
        over: tuple[str, ...],
        num_experts: int,
        count: int,
        ragged: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs on each device, inside `shard_map`.

        Args:
            x: [tokens, input_dim], the tokens of this device.
            expert: int32 [choices, tokens]; `num_experts` for padding.
            weight: float32 [choices, tokens].
            axes: mesh axes that the experts are sharded over, into `count` shards.
            over: all axes of this `shard_map`.
            ragged: whether pairs are sent without padding.

        Returns:
            [tokens, input_dim], the weighted sum over each token's experts; and the number of dropped pairs on all
            devices, a float32 scalar.
        """
        choices, tokens = expert.shape
        pairs = jnp.broadcast_to(x, (choices, *x.shape)).reshape(-1, x.shape[1])

        def combined(y: jax.Array) -> jax.Array:
            y = y.reshape(choices, tokens, -1)
            return (y * weight[..., None].astype(y.dtype)).sum(axis=0)

        lost = jnp.zeros((), jnp.float32)
        if count == 1:
            return combined(by_expert(experts, pairs, expert.reshape(-1), num_experts, self.matmul)), lost
        held = num_experts // count
        most = tokens * min(choices, held)
        places = min(most, math.ceil(self.factor * choices * tokens / count))
        target = expert.reshape(-1) // held
        needed = jnp.zeros((count,), jnp.int32).at[target].add(1, mode="drop")  # padding is out of range
        transport = exchanged if ragged else _padded
        run_with = functools.partial(transport, matmul=self.matmul, axes=axes, held=held, count=count)

        def with_places(places: int) -> Callable[..., Any]:
            return functools.partial(run_with, places=places)

        if self.dropless and places < most:
            largest = jax.lax.psum(needed, axes) / count if ragged else needed
            few = jax.lax.pmax(largest.max(), over) <= places  # all devices must take the same branch
            run = cond(few, remat(with_places(places)), remat(with_places(most)))
        else:
            run = with_places(places)
        if not self.dropless:
            lost = jax.lax.psum(jnp.maximum(needed - places, 0).sum().astype(jnp.float32), over)
        return combined(run(experts, pairs, expert.reshape(-1))), lost


def _padded(
    experts: Experts,
    x: jax.Array,
    expert: jax.Array,
    *,
    matmul: GroupedMatmul,
    axes: tuple[str, ...],
    held: int,
    count: int,
    places: int,
) -> jax.Array:
    """See `axcore_moe.ragged.exchanged`. Each device sends `places` rows to each shard, some of them empty."""
    assignment = RowAssignment.of(expert // held, jnp.arange(count) * places, count * places, places)
    number = jnp.append(expert % held, held)[assignment.pair].astype(jnp.int32)  # local; `held` for an empty place
    swap = functools.partial(jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True)
    arrived = by_expert(experts, swap(assignment.rows_of(x)), swap(number), held, matmul)
    return assignment.pairs_of(swap(arrived))


def _all_axes(layout: Layout) -> tuple[str, ...]:
    """Every automatic mesh axis, those of `batch` and `seq` first, so that tokens stay on their device."""
    return tuple(dict.fromkeys((*_token_axes(layout), *layout.automatic)))


def _token_axes(layout: Layout) -> tuple[str, ...]:
    return (*layout.axes_of("batch"), *layout.axes_of("seq"))
