"""The attention formula (Vaswani et al. 2017, arXiv 1706.03762, eq. 1), over all keys at once or block by block.

Logits and softmax are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.masks import visible
from axcore.nn.kv.views import Contiguous

Sums = tuple[jax.Array, jax.Array, jax.Array]
"""The state of an online softmax: highest logit, sum of weights, sum of weighted values."""

LOWEST = float(jnp.finfo(jnp.float32).min)
"""The logit of a masked key. It is finite, so a query without visible keys does not produce NaN."""


def logits(inputs: AttentionInputs, kv: Contiguous) -> Float[Array, "batch head query key"]:
    """The float32 logits after scale, softcap, bias and mask, without sinks."""
    q, query = inputs.q, inputs.query
    batch, seq, num_heads, _ = q.shape
    # Heads that share a kv head become rows of one matrix product, so k and v are not repeated.
    rows = rearrange(q, "b s (n g) d -> b n (g s) d", n=kv.k.shape[2])
    # Scaling the queries first would round them to bfloat16 once more.
    found = jnp.einsum("bnqd,btnd->bnqt", rows, kv.k, preferred_element_type=jnp.float32) * inputs.scale
    found = found.reshape(batch, num_heads, seq, -1)
    if inputs.softcap is not None:
        found = inputs.softcap * jnp.tanh(found / inputs.softcap)
    if inputs.bias is not None:
        found = found + inputs.bias(query, kv.tokens)
    return jnp.where(visible(inputs.mask, query, kv.tokens)[:, None], found, LOWEST)


def weighted_values(
    inputs: AttentionInputs, kv: Contiguous, weights: Float[Array, "batch head query key"]
) -> Float[Array, "batch query head value_dim"]:
    """The float32 sum of the values with these weights, after dropout."""
    if inputs.dropout is not None:
        kept = inputs.dropout.keep(inputs.query, kv.tokens, (weights.shape[0], weights.shape[1]))
        weights = jnp.where(kept, weights / (1 - inputs.dropout.rate), 0)
    batch, _, seq, _ = weights.shape
    rows = weights.astype(kv.v.dtype).reshape(batch, kv.v.shape[2], -1, kv.v.shape[1])
    out = jnp.einsum("bnqt,btnd->bnqd", rows, kv.v, preferred_element_type=jnp.float32)
    return rearrange(out, "b n (g s) d -> b s (n g) d", s=seq)


def dense_attention(inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
    """Attends to all keys at once. A query that sees no key gets the mean of all values."""
    kv = inputs.plain
    scores = logits(inputs, kv)
    if inputs.sinks is not None:
        sink = jnp.broadcast_to(inputs.sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    else:
        weights = jax.nn.softmax(scores, axis=-1)
    heads = weighted_values(inputs, kv, weights).astype(inputs.q.dtype)
    if not inputs.return_lse:
        return heads, None
    lse = rearrange(jax.nn.logsumexp(scores, axis=-1), "b n s -> b s n")
    return heads, jax.lax.stop_gradient(with_sinks(lse, inputs.sinks))


def blockwise_attention(inputs: AttentionInputs, size: int) -> tuple[Heads, LSE | None]:
    """Attends to `size` keys at a time, which `KVView.block` reads, with an online softmax (Milakov and Gimelshein
    2018, arXiv 1805.02867, algorithm 3)."""
    view = inputs.keys
    batch, seq, num_heads, _ = inputs.q.shape
    key_len = view.shape[1]

    def step(sums: Sums, start: jax.Array) -> tuple[Sums, None]:
        highest, total, out = sums
        first = jnp.minimum(start, key_len - size)  # the last block may overlap the one before it
        kv = view.block(first, size)
        seen = first + jnp.arange(size) >= start
        scores = jnp.where(seen, logits(inputs, kv), LOWEST)
        now = jnp.maximum(highest, scores.max(-1))
        weights, shrink = jnp.where(seen, jnp.exp(scores - now[..., None]), 0), jnp.exp(highest - now)
        part = weighted_values(inputs, kv, weights)
        return (now, total * shrink + weights.sum(-1), out * jnp.moveaxis(shrink, 1, 2)[..., None] + part), None

    shape = (batch, num_heads, seq)
    nothing = jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros((batch, seq, num_heads, view.value_dim))
    (highest, total, out), _ = jax.lax.scan(step, nothing, jnp.arange(0, key_len, size))
    lse = with_sinks(rearrange(highest + jnp.log(total), "b n s -> b s n"), inputs.sinks)
    divisor = jnp.exp(lse - jnp.moveaxis(highest, 1, 2))
    return (out / divisor[..., None]).astype(inputs.q.dtype), jax.lax.stop_gradient(lse) if inputs.return_lse else None


def with_sinks(lse: LSE, sinks: Float[Array, " head"] | None) -> LSE:
    """The log-sum-exp with the logit of each head's sink added."""
    return lse if sinks is None else jnp.logaddexp(lse, sinks.astype(jnp.float32))


def gradients(inputs: AttentionInputs, heads: Heads, lse: LSE, heads_grad: Heads) -> AttentionInputs:
    """See `AttentionKernel.backward`.

    With p = exp(logits - lse) and D = heads . heads_grad, the gradient of the logits is p (v . heads_grad - D). That is
    the gradient of `sum p (v . heads_grad - D)` with lse and D held constant, so softcap, bias and dropout need no
    separate rules.
    """
    inputs = inputs.replace(kv=inputs.plain)
    heads_grad = heads_grad.astype(jnp.float32)
    fixed = (heads.astype(jnp.float32) * heads_grad).sum(-1)

    def surrogate(inputs: AttentionInputs) -> jax.Array:
        kv = inputs.plain
        weights = jnp.exp(logits(inputs, kv) - rearrange(lse, "b s n -> b n s")[..., None])
        along = (weighted_values(inputs, kv, weights) * heads_grad).sum()
        return along - (weights.sum(-1) * rearrange(fixed, "b s n -> b n s")).sum()

    return _floating_gradient(surrogate, inputs)


def _floating_gradient[T](fn: Callable[[T], jax.Array], tree: T) -> T:
    """The gradient of a scalar function with respect to the floating-point leaves of a pytree; None for others."""
    leaves, form = jax.tree.flatten(tree)
    rebuilt = functools.partial(jax.tree.unflatten, form)
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def of_floating(chosen: list[jax.Array]) -> jax.Array:
        rest = iter(chosen)
        return fn(
            rebuilt([next(rest) if is_floating else leaf for leaf, is_floating in zip(leaves, floating, strict=True)])
        )

    found = iter(
        jax.grad(of_floating)([leaf for leaf, is_floating in zip(leaves, floating, strict=True) if is_floating])
    )
    gradient: T = rebuilt([next(found) if is_floating else None for is_floating in floating])
    return gradient
