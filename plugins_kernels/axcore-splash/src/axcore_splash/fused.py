"""Splash attention with packed rows and sinks, as a differentiable function of arrays."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32

from axcore.nn import FusedAttention
from axcore.nn.attention.fused import delta
from axcore_splash import primitives
from axcore_splash.primitives import Form, Segments


def backward(
    form: Form,
    q: Float[Array, "batch seq head head_dim"],
    k: Float[Array, "batch kv_seq kv_head head_dim"],
    v: Float[Array, "batch kv_seq kv_head value_dim"],
    segments: Segments | None,
    heads: Float[Array, "batch seq head value_dim"],
    lse: Float32[Array, "batch head seq"],
    heads_grad: Float[Array, "batch seq head value_dim"],
) -> tuple[
    Float[Array, "batch seq head head_dim"],
    Float[Array, "batch kv_seq kv_head head_dim"],
    Float[Array, "batch kv_seq kv_head value_dim"],
]:
    """See `axcore.nn.FusedAttention`."""
    return primitives.backward(form, q, k, v, lse, delta(heads, heads_grad), heads_grad, segments)


attention = FusedAttention(primitives.forward, backward)
"""Arrays are bfloat16 or float32. The operands are the segment ids of queries and keys, all at least 0, and -1 for keys
that no query sees; a query sees keys with its own id. None: every query sees every key."""
