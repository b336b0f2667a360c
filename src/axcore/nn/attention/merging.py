"""Attention to several subsets of the keys, merged by log-sum-exp."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from axcore.module import custom_vjp
from axcore.nn.attention.choice import attend
from axcore.nn.attention.formula import LOWEST, with_sinks
from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.kernel import AttentionKernel
from axcore.nn.kv.views import KVView

Residuals = tuple[AttentionInputs, tuple[KVView, ...], Heads, LSE]


def merge_by_lse(parts: Sequence[tuple[Heads, LSE]], sinks: Float[Array, " head"] | None = None) -> tuple[Heads, LSE]:
    """Merges the results for disjoint subsets of the keys into the result for all keys.

    Do not differentiate this function, since the log-sum-exps carry no gradient. Use `attend_in_parts` instead.

    Args:
        parts: heads and log-sum-exp of each subset, computed without sinks.
        sinks: the sinks of the whole call.
    """
    all_lse = jnp.stack([jnp.maximum(lse, LOWEST) for _, lse in parts])
    lse = with_sinks(jax.nn.logsumexp(all_lse, axis=0), sinks)
    shares = jnp.exp(all_lse - lse)[..., None]
    heads = sum(share * heads.astype(jnp.float32) for share, (heads, _) in zip(shares, parts, strict=True))
    return heads.astype(parts[0][0].dtype), lse


def attend_in_parts(
    kernel: AttentionKernel, inputs: AttentionInputs, parts: Sequence[KVView]
) -> tuple[Heads, LSE | None]:
    """Attends to disjoint subsets of the keys with one kernel call each, and merges the results.

    A `local` kernel calls this function with the shard of one device.

    The backward pass does not differentiate the merge, since the log-sum-exp of fused kernels carries no gradient. It
    calls `AttentionKernel.backward` for each part with the merged heads and log-sum-exp, which gives exact gradients.

    Args:
        kernel: a kernel that takes `lse`.
        inputs: the inputs of the whole call; `kv` is ignored.
        parts: views that together contain every key exactly once.

    Raises:
        ConfigError: the kernel does not support one of the parts.
    """
    return_lse = inputs.return_lse
    inputs = inputs.replace(kv=None, return_lse=True)

    def part(inputs: AttentionInputs, view: KVView) -> AttentionInputs:
        return inputs.replace(kv=view, sinks=None)

    def attend_to(inputs: AttentionInputs, view: KVView) -> tuple[Heads, LSE]:
        heads, lse = attend(kernel, part(inputs, view))
        assert lse is not None  # since return_lse is set
        return heads, lse

    def run(inputs: AttentionInputs, *views: KVView) -> tuple[Heads, LSE]:
        return merge_by_lse([attend_to(inputs, view) for view in views], inputs.sinks)

    def forward(inputs: AttentionInputs, *views: KVView) -> tuple[tuple[Heads, LSE], Residuals]:
        heads, lse = run(inputs, *views)
        return (heads, lse), (inputs, views, heads, lse)

    def backward(kept: Residuals, grads: tuple[Heads, LSE]) -> tuple[AttentionInputs | KVView | None, ...]:
        inputs, views, heads, lse = kept
        heads_grad = grads[0]
        found = [kernel.backward(part(inputs, view), heads, lse, heads_grad) for view in views]
        total = _added([dataclasses.replace(each, kv=None) for each in found])
        if inputs.sinks is not None:
            total = total.replace(sinks=sinks_gradient(inputs.sinks, heads, lse, heads_grad))
        return total, *(each.kv for each in found)

    heads, lse = custom_vjp(run, forward, backward)(inputs, *parts)
    return heads, lse if return_lse else None


def sinks_gradient(sinks: Float[Array, " head"], heads: Heads, lse: LSE, heads_grad: Heads) -> Float[Array, " head"]:
    """The gradient of the sinks of a whole call. `heads` and `lse` are its merged results."""
    along = (heads.astype(jnp.float32) * heads_grad.astype(jnp.float32)).sum(-1)
    return -(jnp.exp(sinks.astype(jnp.float32) - lse) * along).sum((0, 1)).astype(sinks.dtype)


def _added(found: list[AttentionInputs]) -> AttentionInputs:
    """The sum of several gradients of the same inputs, leaf by leaf."""
    total: AttentionInputs = jax.tree.map(lambda *each: sum(each[1:], start=each[0]), *found)
    return total
