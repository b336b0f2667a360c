"""A strategy of context parallelism: how attention computes when each device has a part of every row."""

from __future__ import annotations

import dataclasses
import functools

import jax

from axcore.nn import LSE, AttentionInputs, AttentionKernel, Heads, KernelRequest
from axcore.parallel import ContextParallelism


class GatherKeys(ContextParallelism):
    """Each device gathers all keys and values, and attends with its own queries (Llama 3, arXiv 2407.21783, section
    3.3.2)."""

    class Config(ContextParallelism.Config):
        """See `GatherKeys`."""

    def requests(self, request: KernelRequest, shards: int) -> tuple[KernelRequest, ...]:
        """See `axcore.parallel.ContextParallelism`."""
        return (dataclasses.replace(request, key_len=request.key_len * shards, aligned=False),)

    def attend(
        self, kernel: AttentionKernel, inputs: AttentionInputs, axes: tuple[str, ...], shards: int
    ) -> tuple[Heads, LSE | None]:
        """See `axcore.parallel.ContextParallelism`."""
        gathered = functools.partial(jax.lax.all_gather, axis_name=axes, axis=1, tiled=True)
        return kernel(inputs.replace(kv=jax.tree.map(gathered, inputs.plain)))
