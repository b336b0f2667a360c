"""NKI attention for any length, with packed rows, sinks, the log-sum-exp and a gradient, as functions of arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int

from axcore_nki.calls import KEY_TILE, TILE, Bounds, Form, backward, forward

HEADS, LSE = "heads", "lse"
"""The names of the results of `attention` for remat policies."""


def attention(
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head head_dim"],
    form: Form,
    *,
    segment_ids: Int[Array, "batch seq"] | None = None,
    sinks: Float[Array, " head"] | None = None,
) -> tuple[Float[Array, "batch seq head head_dim"], Float32[Array, "batch head seq"]]:
    """softmax(scale q k^T) v, and the logarithm of the softmax's denominator.

    The gradient is computed from the heads and the lse. Both are tagged for remat policies ("heads", "lse"); with a
    policy that saves both, the backward pass does not rerun the forward kernel.

    Args:
        q, k, v: bfloat16; each kv head serves `head / kv_head` consecutive heads.
        segment_ids: given for packed rows. Tokens attend within runs of equal ids. Requires `kv_seq == seq`.
        sinks: the logit of an additional key per head, whose value is zero (arXiv 2309.17453).

    Returns:
        The heads in the dtype of q, and the lse, which includes `sinks` and carries no gradient. To differentiate
        heads that are merged by lse, call `attention_backward` with the merged results.
    """
    heads, lse = _attention(form, q, k, v, segment_ids, sinks)
    return heads, jax.lax.stop_gradient(lse)


def attention_backward(
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head head_dim"],
    heads: Float[Array, "batch seq head head_dim"],
    lse: Float32[Array, "batch head seq"],
    heads_grad: Float[Array, "batch seq head head_dim"],
    form: Form,
    *,
    segment_ids: Int[Array, "batch seq"] | None = None,
) -> tuple[
    Float[Array, "batch seq head head_dim"],
    Float[Array, "batch kv_seq kv_head head_dim"],
    Float[Array, "batch kv_seq kv_head head_dim"],
]:
    """Gradients of q, k and v. `heads` and `lse` may include sinks and keys that are not in `k`.

    Returns the gradients of the given keys and values, and their contribution to the gradient of q.
    """
    seq, kv_seq, bounds = q.shape[1], k.shape[1], _bounds(form, q, k, segment_ids)
    more = padded_length(seq) - seq
    # The added queries have no gradient, and so contribute nothing to those of keys and values.
    lse = jnp.pad(lse, ((0, 0), (0, 0), (0, more)))
    dq, dk, dv = backward(form, _pad(q), _pad(k), _pad(v), _pad(heads), lse, _pad(heads_grad), bounds)
    return dq[:, :seq], dk[:, :kv_seq], dv[:, :kv_seq]


def padded_length(length: int) -> int:
    """The least length that the kernels support: 128, 256 or a multiple of 512."""
    fits = (size for size in (TILE, 2 * TILE) if length <= size)
    return next(fits, -(-length // KEY_TILE) * KEY_TILE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    form: Form, q: Array, k: Array, v: Array, segment_ids: Array | None, sinks: Array | None
) -> tuple[Array, Array]:
    return _attention_fwd(form, q, k, v, segment_ids, sinks)[0]


def _attention_fwd(form: Form, q: Array, k: Array, v: Array, segment_ids: Array | None, sinks: Array | None) -> Any:
    seq = q.shape[1]
    heads, lse = forward(form, _pad(q), _pad(k), _pad(v), _bounds(form, q, k, segment_ids), sinks)
    # Tagged as [batch, seq, features], the shape that the output projection reads, so that the array is saved once.
    flat = checkpoint_name(heads[:, :seq].reshape(*q.shape[:2], -1), HEADS)
    lse = checkpoint_name(lse[..., :seq], LSE)
    return (flat.reshape(q.shape), lse), (q, k, v, segment_ids, sinks, flat, lse)


def _attention_bwd(form: Form, saved: Any, grads: tuple[Array, Array]) -> tuple[Array | None, ...]:
    q, k, v, segment_ids, sinks, flat, lse = saved
    heads, heads_grad = flat.reshape(q.shape), grads[0]
    dq, dk, dv = attention_backward(q, k, v, heads, lse, heads_grad, form, segment_ids=segment_ids)
    if sinks is None:
        return dq, dk, dv, None, None
    # A sink is a key whose value is zero: its gradient is p * (0 - sum(heads * heads_grad)).
    weight = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
    delta = jnp.sum(heads.astype(jnp.float32) * heads_grad.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    return dq, dk, dv, None, -jnp.sum(weight * delta, axis=(0, 2)).astype(sinks.dtype)


_attention.defvjp(_attention_fwd, _attention_bwd)


def _pad(x: Array) -> Array:
    """Pads [batch, seq, ...] with zeros to a length that the kernels support."""
    more = padded_length(x.shape[1]) - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])


def _bounds(form: Form, q: Array, k: Array, segment_ids: Array | None) -> Bounds | None:
    """The keys that each padded query may see; None if causality alone decides. Every query sees some key, so that no
    result is undefined: padding is a document of its own."""
    batch, seq = q.shape[0], padded_length(q.shape[1])
    if segment_ids is not None:
        return _runs(jnp.pad(segment_ids, ((0, 0), (0, seq - q.shape[1])), constant_values=-1))
    if form.causal or padded_length(k.shape[1]) == k.shape[1]:
        return None
    return jnp.zeros((batch, seq), jnp.int32), jnp.full((batch, seq), k.shape[1], jnp.int32)


def _runs(ids: Int[Array, "batch seq"]) -> Bounds:
    """The start and the end of the run of equal ids that each token is in."""
    length = ids.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    differs = ids[:, 1:] != ids[:, :-1]
    begins = jnp.pad(differs, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(differs, ((0, 0), (0, 1)), constant_values=True)
    start = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    return start, jax.lax.cummin(jnp.where(ends, index + 1, length), axis=1, reverse=True)
