"""Attention to several parts of the keys, merged by log-sum-exp."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axcore.module import custom_vjp
from axcore.nn.attention.formula import LOWEST, with_sinks
from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.kernel import AttentionKernel
from axcore.nn.kv.views import KVView


def merged(parts: Sequence[tuple[Heads, LSE]], sinks: jax.Array | None = None) -> tuple[Heads, LSE]:
    """Heads and log-sum-exps of disjoint parts of the keys -> those of all keys. Forward only: see `attend_in_parts`.

    Args:
        sinks: [head], counted once, here and not in the parts.
    """
    all_lse = jnp.stack([jnp.maximum(lse, LOWEST) for _, lse in parts])
    lse = with_sinks(jax.nn.logsumexp(all_lse, axis=0), sinks)
    shares = jnp.exp(all_lse - lse)[..., None]
    heads = sum(share * heads.astype(jnp.float32) for share, (heads, _) in zip(shares, parts, strict=True))
    return heads.astype(parts[0][0].dtype), lse


def attend_in_parts(
    kernel: AttentionKernel, inputs: AttentionInputs, parts: Sequence[KVView]
) -> tuple[Heads, LSE | None]:
    """Attends to each part of the keys by one call of a kernel that takes `lse`, and merges.

    The gradient is right: the log-sum-exp that fused kernels return carries none, so the backward pass hands each part
    the merged heads and log-sum-exp (`AttentionKernel.backward`) instead of differentiating the merge.

    Args:
        inputs: of the whole; its `kv` is not read.
        parts: views that together hold the keys, each key once.
    """
    wanted = inputs.return_lse
    inputs = inputs.replace(kv=None, return_lse=True)

    def part(inputs: AttentionInputs, view: KVView) -> AttentionInputs:
        return inputs.replace(kv=view, sinks=None)

    def run(inputs: AttentionInputs, *views: KVView) -> Any:
        return merged([kernel(part(inputs, view)) for view in views], inputs.sinks)  # type: ignore[misc]

    def forward(inputs: AttentionInputs, *views: KVView) -> Any:
        heads, lse = run(inputs, *views)
        return (heads, lse), (inputs, views, heads, lse)

    def backward(kept: Any, grads: Any) -> Any:
        inputs, views, heads, lse = kept
        heads_grad = grads[0]
        found = [kernel.backward(part(inputs, view), heads, lse, heads_grad) for view in views]
        total = _added([dataclasses.replace(each, kv=None) for each in found])
        if inputs.sinks is not None:
            along = (heads.astype(jnp.float32) * heads_grad.astype(jnp.float32)).sum(-1)
            sinks = -(jnp.exp(inputs.sinks.astype(jnp.float32) - lse) * along).sum((0, 1))
            total = total.replace(sinks=sinks.astype(inputs.sinks.dtype))
        return total, *(each.kv for each in found)

    heads, lse = custom_vjp(run, forward, backward)(inputs, *parts)
    return heads, lse if wanted else None


def _added(found: list[AttentionInputs]) -> AttentionInputs:
    """The sums of gradients of the same inputs."""
    return jax.tree.map(lambda *each: sum(each[1:], start=each[0]), *found)
