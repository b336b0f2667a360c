"""Expert parallelism without padding: each device sends exactly the rows that another one needs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from axcore.nn import GroupedMatmul
from axcore_moe.dispatch import by_expert
from axcore_moe.experts import Experts
from axcore_moe.routing import RowAssignment, counts


class ExpertShards(NamedTuple):
    """How experts are sharded and computed.

    Attributes:
        axes: mesh axes that the experts are sharded over.
        num_shards: number of shards.
        num_local_experts: number of experts in each shard.
        matmul: the grouped product that computes them.
    """

    axes: tuple[str, ...]
    num_shards: int
    num_local_experts: int
    matmul: GroupedMatmul


def ragged_exchange(
    experts: Experts, x: jax.Array, expert: jax.Array, *, shards: ExpertShards, capacity: int
) -> jax.Array:
    """The output of each pair's expert, whichever device has it: [pairs, input_dim].

    Args:
        experts: the experts of this device.
        x: [tokens, input_dim]; see `RowAssignment.permute` for the order of the pairs.
        expert: int32 [pairs]; `num_shards * num_local_experts` for a pair without an expert.
        capacity: number of pairs that a device may receive, divided by the number of shards.
    """
    axes, num_shards, num_local_experts, matmul = shards
    of_expert = counts(expert, num_local_experts * num_shards)
    assignment = RowAssignment.of(expert, jnp.cumulative_sum(of_expert) - of_expert, expert.size)
    # [sender, receiver, expert]
    everywhere = jax.lax.all_gather(of_expert, axes).reshape(num_shards, num_shards, num_local_experts)
    ends = jnp.cumulative_sum(everywhere[:, jax.lax.axis_index(axes)].reshape(-1))
    # The rows of each sender arrive sorted by expert.
    index = jnp.searchsorted(ends, jnp.arange(num_shards * capacity), side="right")
    local_expert = jnp.where(index < ends.size, index % num_local_experts, num_local_experts).astype(jnp.int32)
    sizes, pairs = everywhere.sum(axis=-1), expert.size
    arrived = _sent(assignment.permute(x), sizes, (pairs, num_shards * capacity), axes)
    y = by_expert(experts, arrived, local_expert, num_local_experts, matmul)
    return assignment.unpermute(_sent(y, sizes.T, (num_shards * capacity, pairs), axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _sent(x: jax.Array, sizes: jax.Array, rows: tuple[int, int], axes: tuple[str, ...]) -> jax.Array:
    """Sends rows to other devices: [rows[0], features] -> [rows[1], features].

    The rows for device 0 come first, then those for device 1, and so on. The result has the rows from device 0 first,
    and zeros at the end.

    Args:
        sizes: int32 [sender, receiver], the same on all devices.
    """
    here = jax.lax.axis_index(axes)
    send, before = sizes[here], jnp.cumulative_sum(sizes, axis=0) - sizes
    return jax.lax.ragged_all_to_all(
        x,
        jnp.zeros((rows[1], x.shape[1]), x.dtype),
        input_offsets=jnp.cumulative_sum(send) - send,
        send_sizes=send,
        output_offsets=before[here],  # in the result of the receiver
        recv_sizes=sizes[:, here],
        axis_name=axes,
    )


def _forward(
    x: jax.Array, sizes: jax.Array, rows: tuple[int, int], axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    return _sent(x, sizes, rows, axes), sizes


def _backward(rows: tuple[int, int], axes: tuple[str, ...], sizes: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    return _sent(g, sizes.T, rows[::-1], axes), None


_sent.defvjp(_forward, _backward)
