"""The formula of attention as it stands (Vaswani et al. 2017, arXiv 1706.03762, eq. 1), for one block of keys or all.

Logits and softmax are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.masks import visible
from axcore.nn.kv.views import Contiguous

LOWEST = float(jnp.finfo(jnp.float32).min)
"""The logit of what a query does not see. Finite, so that a row without any key gives no NaN."""


def logits(inputs: AttentionInputs, kv: Contiguous) -> Float[Array, "batch head query key"]:
    """Scaled, capped, biased and masked, in float32; sinks are not in it."""
    q, query = inputs.q, inputs.query
    batch, seq, num_heads, _ = q.shape
    # The heads that share keys are rows of one product: one batched matrix product, and no copy of k and v.
    rows = rearrange(q, "b s (n g) d -> b n (g s) d", n=kv.k.shape[2])
    # Scaled after the product: rounding scaled queries to bfloat16 would cost three digits.
    found = jnp.einsum("bnqd,btnd->bnqt", rows, kv.k, preferred_element_type=jnp.float32) * inputs.scale
    found = found.reshape(batch, num_heads, seq, -1)
    if inputs.softcap is not None:
        found = inputs.softcap * jnp.tanh(found / inputs.softcap)
    if inputs.bias is not None:
        found = found + inputs.bias(query, kv.tokens)
    return jnp.where(visible(inputs.mask, query, kv.tokens)[:, None], found, LOWEST)


def weighted(
    inputs: AttentionInputs, kv: Contiguous, weights: Float[Array, "batch head query key"]
) -> Float[Array, "batch query head value_dim"]:
    """The sum of values with these weights, after dropout, in float32."""
    if inputs.dropout is not None:
        kept = inputs.dropout.keep(inputs.query, kv.tokens, (weights.shape[0], weights.shape[1]))
        weights = jnp.where(kept, weights / (1 - inputs.dropout.rate), 0)
    batch, _, seq, _ = weights.shape
    rows = weights.astype(kv.v.dtype).reshape(batch, kv.v.shape[2], -1, kv.v.shape[1])
    out = jnp.einsum("bnqt,btnd->bnqd", rows, kv.v, preferred_element_type=jnp.float32)
    return rearrange(out, "b n (g s) d -> b s (n g) d", s=seq)


def attend(inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
    """All keys at once. A query that sees no key gets a mean over all of them."""
    kv = inputs.plain
    scores = logits(inputs, kv)
    if inputs.sinks is not None:
        sink = jnp.broadcast_to(inputs.sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    else:
        weights = jax.nn.softmax(scores, axis=-1)
    heads = weighted(inputs, kv, weights).astype(inputs.q.dtype)
    if not inputs.return_lse:
        return heads, None
    lse = rearrange(jax.nn.logsumexp(scores, axis=-1), "b n s -> b s n")
    return heads, jax.lax.stop_gradient(with_sinks(lse, inputs.sinks))


def attend_in_blocks(inputs: AttentionInputs, size: int) -> tuple[Heads, LSE | None]:
    """A block of keys at a time, as the view brings them; the softmax is computed online (Milakov and Gimelshein 2018,
    arXiv 1805.02867, algorithm 3)."""
    view = inputs.keys
    batch, seq, num_heads, _ = inputs.q.shape
    key_len = view.shape[1]

    def step(sums: Any, start: jax.Array) -> tuple[Any, None]:
        highest, total, out = sums
        first = jnp.minimum(start, key_len - size)  # the last block may begin inside the one before
        kv = view.block(first, size)
        seen = first + jnp.arange(size) >= start
        scores = jnp.where(seen, logits(inputs, kv), LOWEST)
        now = jnp.maximum(highest, scores.max(-1))
        weights, shrink = jnp.where(seen, jnp.exp(scores - now[..., None]), 0), jnp.exp(highest - now)
        part = weighted(inputs, kv, weights)
        return (now, total * shrink + weights.sum(-1), out * jnp.moveaxis(shrink, 1, 2)[..., None] + part), None

    shape = (batch, num_heads, seq)
    nothing = jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros((batch, seq, num_heads, view.value_dim))
    (highest, total, out), _ = jax.lax.scan(step, nothing, jnp.arange(0, key_len, size))
    lse = with_sinks(rearrange(highest + jnp.log(total), "b n s -> b s n"), inputs.sinks)
    divisor = jnp.exp(lse - jnp.moveaxis(highest, 1, 2))
    return (out / divisor[..., None]).astype(inputs.q.dtype), lse if inputs.return_lse else None


def with_sinks(lse: LSE, sinks: jax.Array | None) -> LSE:
    """The log-sum-exp with one more logit for each head."""
    return lse if sinks is None else jnp.logaddexp(lse, sinks.astype(jnp.float32))


def gradients(inputs: AttentionInputs, heads: Heads, lse: LSE, heads_grad: Heads) -> AttentionInputs:
    """See `AttentionKernel.backward`.

    With p = exp(logits - lse) and D = heads . heads_grad the gradient of the logits is p (v . heads_grad - D). That is
    the gradient of `sum p (v . heads_grad - D)` with lse and D held fixed, so the options need no rules of their own.
    """
    inputs = inputs.replace(kv=inputs.plain)
    heads_grad = heads_grad.astype(jnp.float32)
    fixed = (heads.astype(jnp.float32) * heads_grad).sum(-1)

    def surrogate(inputs: AttentionInputs) -> jax.Array:
        kv = inputs.plain
        weights = jnp.exp(logits(inputs, kv) - rearrange(lse, "b s n -> b n s")[..., None])
        along = (weighted(inputs, kv, weights) * heads_grad).sum()
        return along - (weights.sum(-1) * rearrange(fixed, "b s n -> b n s")).sum()

    return floating_gradient(surrogate, inputs)


def floating_gradient(fn: Callable[[Any], jax.Array], tree: Any) -> Any:
    """The gradient of a scalar function with respect to every floating-point array of a pytree; None for the others."""
    leaves, form = jax.tree.flatten(tree)
    rebuilt = functools.partial(jax.tree.unflatten, form)
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def of_floating(chosen: list[jax.Array]) -> jax.Array:
        rest = iter(chosen)
        return fn(rebuilt([next(rest) if is_one else leaf for leaf, is_one in zip(leaves, floating, strict=True)]))

    found = iter(jax.grad(of_floating)([leaf for leaf, is_one in zip(leaves, floating, strict=True) if is_one]))
    return rebuilt([next(found) if is_one else None for is_one in floating])
