"""Context parallelism by all-to-alls between a sequence-sharded and a head-sharded layout."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.kernel import AttentionKernel
from axcore.nn.attention.request import KernelRequest
from axcore.nn.kv.views import Contiguous
from axcore.parallel import ContextParallelism


class AllToAll(ContextParallelism):
    """Each device computes some of the heads for the whole sequence (DeepSpeed-Ulysses, arXiv 2309.14509).

    An all-to-all before the kernel reshards queries, keys and values from the sequence to the heads, and one after the
    kernel reshards the result back. The kernel sees whole rows, so fused kernels for packed rows, causal masks or
    windows work unchanged. The number of heads on a device must be a multiple of the number of shards of the sequence.
    If there are fewer kv heads than shards, each is sent to several devices.
    """

    class Config(ContextParallelism.Config):
        """See `AllToAll`."""

    def refusal(self, request: KernelRequest, shards: int) -> str | None:
        """See `ContextParallelism`."""
        if request.num_heads % shards == 0:
            return None
        fits = [count for count in range(1, request.num_heads + 1) if request.num_heads % count == 0]
        return (
            f"requires the heads of a device to be a multiple of {shards}, got {request.num_heads}. Shard the sequence "
            f"over {', '.join(map(str, fits))} devices, or set mesh.context to RingAttention"
        )

    def requests(self, request: KernelRequest, shards: int) -> tuple[KernelRequest, ...]:
        """See `ContextParallelism`."""
        whole = dataclasses.replace(
            request,
            query_len=request.query_len * shards,
            key_len=request.key_len * shards,
            num_heads=request.num_heads // shards,
            num_kv_heads=math.lcm(request.num_kv_heads, shards) // shards,
        )
        return (whole,)

    def attend(
        self, kernel: AttentionKernel, inputs: AttentionInputs, axes: tuple[str, ...], shards: int
    ) -> tuple[Heads, LSE | None]:
        """See `ContextParallelism`."""
        to_heads = functools.partial(jax.lax.all_to_all, axis_name=axes, split_axis=2, concat_axis=1, tiled=True)
        to_sequence = functools.partial(jax.lax.all_to_all, axis_name=axes, split_axis=1, concat_axis=2, tiled=True)
        whole = functools.partial(jax.lax.all_gather, axis_name=axes, axis=1, tiled=True)
        kv, query = inputs.plain, jax.tree.map(whole, inputs.query)
        tokens = query if inputs.query is kv.tokens else jax.tree.map(whole, kv.tokens)
        copies = math.lcm(kv.k.shape[2], shards) // kv.k.shape[2]
        k, v = (to_heads(jnp.repeat(x, copies, axis=2)) for x in (kv.k, kv.v))
        heads, lse = kernel(
            _own_heads(inputs, axes, shards).replace(q=to_heads(inputs.q), kv=Contiguous(k, v, tokens), query=query)
        )
        return to_sequence(heads), None if lse is None else to_sequence(lse)


def _own_heads(inputs: AttentionInputs, axes: tuple[str, ...], shards: int) -> AttentionInputs:
    """The inputs with the sinks, biases and dropout of the heads of this device."""
    count = inputs.q.shape[2] // shards

    def own(x: jax.Array | None) -> jax.Array:
        x = jnp.arange(inputs.q.shape[2], dtype=jnp.int32) if x is None else x
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * count, count)

    sinks, bias, dropout = inputs.sinks, inputs.bias, inputs.dropout
    return inputs.replace(
        sinks=None if sinks is None else own(sinks),
        bias=None if bias is None else dataclasses.replace(bias, heads=own(bias.heads)),
        dropout=None if dropout is None else dataclasses.replace(dropout, heads=own(dropout.heads)),
    )
