"""Splash attention with packed rows, sinks, the log-sum-exp and a gradient, as functions of arrays."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from axcore_splash.primitives import Form, Segments, backward, forward

HEADS, LSE = "heads", "lse"
"""The names of the results of `attention` for remat policies."""


def attention(
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head value_dim"],
    form: Form,
    *,
    segments: Segments | None = None,
    sinks: Float[Array, " head"] | None = None,
) -> tuple[Float[Array, "batch seq head value_dim"], Float32[Array, "batch head seq"]]:
    """softmax(scale q k^T) v, and the logarithm of the softmax's denominator.

    The gradient is computed from the heads and the lse. Both are tagged for remat policies ("heads", "lse"); with a
    policy that saves both, the backward pass does not rerun the forward kernel.

    Args:
        q, k, v: bfloat16 or float32; each kv head serves `head / kv_head` consecutive heads.
        segments: segment ids of queries and keys, all at least 0; -1 for keys that no query sees. A query sees keys
            with its own id.
        sinks: the logit of an additional key per head, whose value is zero (arXiv 2309.17453).

    Returns:
        The heads in the dtype of q, and the lse, which includes `sinks` and carries no gradient. To differentiate
        heads that are merged by lse, call `attention_backward` with the merged results.
    """
    heads, lse = _attention(form, q, k, v, segments, sinks)
    return heads, jax.lax.stop_gradient(lse)


def attention_backward(
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head value_dim"],
    heads: Float[Array, "batch seq head value_dim"],
    lse: Float32[Array, "batch head seq"],
    heads_grad: Float[Array, "batch seq head value_dim"],
    form: Form,
    *,
    segments: Segments | None = None,
) -> tuple[
    Float[Array, "batch seq head head_dim"],
    Float[Array, "batch kv_seq kv_head head_dim"],
    Float[Array, "batch kv_seq kv_head value_dim"],
]:
    """Gradients of q, k and v. `heads` and `lse` may include keys that are not in `k`.

    Returns the gradients of the given keys and values, and their contribution to the gradient of q.
    """
    return backward(form, q, k, v, lse, _delta(heads, heads_grad), heads_grad, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    form: Form, q: Array, k: Array, v: Array, segments: Segments | None, sinks: Array | None
) -> tuple[Array, Array]:
    return _attention_fwd(form, q, k, v, segments, sinks)[0]


def _attention_fwd(
    form: Form, q: Array, k: Array, v: Array, segments: Segments | None, sinks: Array | None
) -> tuple[tuple[Array, Array], Any]:
    heads, lse = forward(form, q, k, v, segments, sinks)
    # Tagged as [batch, seq, features], the shape that the output projection reads, so that the array is saved once.
    flat = checkpoint_name(heads.reshape(*heads.shape[:2], -1), HEADS)
    lse = checkpoint_name(lse, LSE)
    return (flat.reshape(heads.shape), lse), (q, k, v, segments, sinks, flat, lse)


def _attention_bwd(form: Form, saved: Any, grads: tuple[Array, Array]) -> tuple[Array | None, ...]:
    q, k, v, segments, sinks, flat, lse = saved
    heads_grad = grads[0]
    delta = _delta(flat.reshape(heads_grad.shape), heads_grad)
    dq, dk, dv = backward(form, q, k, v, lse, delta, heads_grad, segments)
    if sinks is None:
        return dq, dk, dv, None, None
    # A sink is a key whose value is zero: its gradient is p * (0 - delta).
    weight = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
    return dq, dk, dv, None, -jnp.sum(weight * delta, axis=(0, 2)).astype(sinks.dtype)


def _delta(heads: Array, heads_grad: Array) -> Float32[Array, "batch head seq"]:
    return jnp.sum(heads.astype(jnp.float32) * heads_grad.astype(jnp.float32), axis=-1).transpose(0, 2, 1)


_attention.defvjp(_attention_fwd, _attention_bwd)
