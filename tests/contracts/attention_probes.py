"""Third-party kernels and caches for the attention contracts. Another process imports them by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from axcore.nn import (
    AttentionInputs,
    AttentionKernel,
    KernelRequest,
    KVCache,
    ReferenceKernel,
    attend_in_parts,
    refusal,
)


class SplitKeys(AttentionKernel):
    """Attends to two halves of the keys with any kernel that takes `lse`, and merges."""

    class Config(AttentionKernel.Config):
        kernel: AttentionKernel.Config = ReferenceKernel.Config()

    takes = frozenset({"softcap", "sinks", "bias", "dropout", "lse"})

    def __init__(self, cfg, *, rngs):
        self.kernel = self.child("kernel", cfg.kernel, rngs, head_dim=cfg.head_dim)

    def supports(self, request: KernelRequest) -> str | None:
        inner = dataclasses.replace(request, key_len=request.key_len // 2, options=(*request.options, "lse"))
        return refusal(self.kernel, inner)

    def __call__(self, inputs: AttentionInputs) -> Any:
        kv, half = inputs.plain, inputs.plain.k.shape[1] // 2
        return attend_in_parts(self.kernel, inputs, [kv.block(0, half), kv.block(half, kv.k.shape[1] - half)])


class LocalKernel(ReferenceKernel):
    """The reference kernel under `shard_map`. It fails if its inputs are larger than the shards of one device."""

    local = True

    def __call__(self, inputs: AttentionInputs) -> Any:
        kv = inputs.plain
        if jax.device_count() == 8 and inputs.q.shape[0] == 2:
            assert inputs.q.shape[:3] == (2, 4, 2), inputs.q.shape
            assert kv.k.shape[:3] == (2, 8, 1), kv.k.shape
            assert inputs.sinks.shape == (2,)
            assert inputs.query.segment_ids.shape == (2, 4)
        return super().__call__(inputs)


class RoundedKV(KVCache):
    """Stores nothing. Rounds keys and values like int8 codes, so that a full forward pass is the reference."""

    class Config(KVCache.Config):
        value_dim: int | None = None

    def __call__(self, inputs: AttentionInputs) -> AttentionInputs:
        kv = inputs.plain
        k, v = (decoded(*encoded(x)) for x in (kv.k, kv.v))
        return inputs.replace(kv=dataclasses.replace(kv, k=k, v=v))


def encoded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 codes, and a float32 scale for each vector of the last dimension."""
    scale = jnp.abs(x).max(-1, initial=1e-9) / 127
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale


def decoded(codes: jax.Array, scale: jax.Array) -> jax.Array:
    return codes * scale[..., None]
